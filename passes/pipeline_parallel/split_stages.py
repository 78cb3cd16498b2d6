"""`split_stages`: the graph of each pipeline stage, with a prologue and an epilogue.

Each stage passes values on to the next stage, and gradients back to the one before. Every stage
computes values that depend on inputs alone. Stages return losses and new buffers as
`MicrobatchPartial`s, and the epilogue computes the returned values from their totals. The prologue
computes sums over the batch that depend on inputs alone, before any stage runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import (
    BatchTotal,
    InputRole,
    MicrobatchPartial,
    Output,
    OutputRole,
    Parameter,
    StageInput,
    Tangent,
)
from autopar.passes.core.node_builder import aten
from autopar.passes.pipeline_parallel.stage_assignment import StageAssignment, assign_stages
from autopar.passes.pipeline_parallel.stage_interface import stage_interface

Terms = tuple[fx.Node, ...]


@dataclass(frozen=True)
class PipelineStages:
    """The graphs of a pipeline.

    Attributes:
        prologue: graph of partial sums that depend on inputs alone; None if there are none.
        stages: graph of each stage, for one micro-batch.
        epilogue: graph from totals to the outputs without batch dims and the new buffers.
        replicated_partials: indices of the partials that are equal for every micro-batch and
            data-parallel rank.
    """

    prologue: TrainingGraph | None
    stages: tuple[TrainingGraph, ...]
    epilogue: TrainingGraph
    replicated_partials: frozenset[int]

    @cached_property
    def output_stage(self) -> dict[int, int]:
        """The stage of each output that a stage returns, by index of the output."""
        graphs = enumerate(self.stages)
        return {r.index: s for s, g in graphs for r in g.outputs if isinstance(r, Output)}

    @cached_property
    def tangents(self) -> frozenset[int]:
        """Indices of the outputs that have a gradient."""
        return frozenset(r.index for g in self.stages for r in g.inputs if isinstance(r, Tangent))

    @property
    def has_late_totals(self) -> bool:
        """Whether a backward reads a total over all forwards."""
        roles = (role for graph in self.stages for role in graph.inputs)
        return any(isinstance(role, BatchTotal) and role.late for role in roles)

    @cached_property
    def can_interleave_backward(self) -> bool:
        """Whether backwards may run among forwards: one loss, and no backward needs a total."""
        losses = self.tangents - set(self.output_stage)
        return len(self.tangents) == len(losses) == 1 and not self.has_late_totals


def split_stages(graph: TrainingGraph, stages: int) -> PipelineStages:
    """Splits a graph after `PlaceStages`, partitioned or not.

    Args:
        graph: graph of one micro-batch.
        stages: number of stages.

    Raises:
        StrategyError: a stage is empty, or an earlier stage reads a forward value of a later one.
    """
    assignment = assign_stages(graph.copy(), stages)
    interface = stage_interface(assignment)
    totals = {node: BatchTotal(i, True) for node, i in interface.totals.items()}

    def end_graph(results: Mapping[OutputRole, fx.Node], nodes: Terms) -> TrainingGraph:
        terms = {role: (node,) for role, node in results.items()}
        return _extract(assignment, terms, nodes, totals, phase="forward")

    graphs = []
    for stage in range(stages):
        partials: dict[OutputRole, Terms] = {
            MicrobatchPartial(index): (node,)
            for node, index in interface.totals.items()
            if assignment.stage[node] == stage
        }
        sent = {role: (node,) for role, node in interface.sent[stage].items()}
        received = {
            n: totals[n] for n in interface.late_reads[stage] if assignment.stage[n] != stage
        }
        inputs: dict[fx.Node, InputRole] = {**received, **interface.received[stage]}
        results = {**sent, **assignment.outputs[stage], **partials}
        graphs.append(_extract(assignment, results, (*interface.needed[stage], *inputs), inputs))
    return PipelineStages(
        end_graph(assignment.prologue, interface.prologue) if assignment.prologue else None,
        tuple(graphs),
        end_graph(assignment.epilogue, interface.epilogue),
        frozenset(interface.totals.values()),
    )


def _extract(
    assignment: StageAssignment,
    results: Mapping[OutputRole, Terms],
    nodes: Iterable[fx.Node],
    received: Mapping[fx.Node, InputRole],
    phase: str = "",
) -> TrainingGraph:
    """The graph of some nodes.

    Args:
        assignment: stages of the whole graph.
        results: terms of each output; several are summed.
        nodes: nodes to copy.
        received: roles of the nodes that are inputs here.
        phase: phase of all nodes; "" keeps forward and backward apart.
    """
    graph = assignment.graph
    roles = {**dict(zip(graph.placeholders, graph.inputs, strict=True)), **received}

    def phase_of(node: fx.Node) -> str:
        if node in roles:
            return phase or _input_phase(roles[node])
        late = node.meta["phase"] == "backward" or assignment.dependence[node] == "totals"
        return phase or ("backward" if late else node.meta["phase"])

    ordered = sorted(set(nodes))
    inputs = [node for node in ordered if node in roles]
    body = [node for node in ordered if node not in roles]
    body.sort(key=lambda node: phase_of(node) == "backward")
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = new.placeholder(node.name)
    for node in body:
        copies[node] = new.node_copy(node, copies.__getitem__)
    for node, copy in copies.items():
        copy.meta = {**node.meta, "phase": phase_of(node)}
    new.output([_sum(new, [copies[term] for term in terms]) for terms in results.values()])
    names = {role.name for node in inputs if isinstance(role := roles[node], Parameter)}
    return replace(
        graph,
        graph=new,
        inputs=tuple(roles[node] for node in inputs),
        outputs=tuple(results),
        parameters={n: p for n, p in graph.parameters.items() if n in names},
    )


def _input_phase(role: InputRole) -> str:
    """The phase that an input of a stage arrives in."""
    if isinstance(role, StageInput):
        return role.phase
    late = isinstance(role, Tangent) or (isinstance(role, BatchTotal) and role.late)
    return "backward" if late else "forward"


def _sum(graph: fx.Graph, terms: list[fx.Node]) -> fx.Node:
    """The sum of several terms, written at the end of a graph."""
    total = terms[0]
    for term in terms[1:]:
        total = graph.call_function(aten.add.Tensor, (total, term))
        total.meta = dict(term.meta)
    return total
