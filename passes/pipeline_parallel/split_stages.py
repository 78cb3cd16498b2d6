"""`split_stages`: the graph of each pipeline stage, with a prologue and an epilogue.

Each stage passes values on to the next stage, and gradients back to the one before. Every stage
computes values that depend on inputs alone. Stages return losses and new buffers as
`MicrobatchPartial`s, and the epilogue computes the returned values from their totals. The prologue
computes sums over the batch that depend on inputs alone, before any stage runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.errors import StrategyError
from autopar.ir.graph import TrainingGraph, source_line
from autopar.ir.roles import (
    BatchTotal,
    InputRole,
    MicrobatchPartial,
    Output,
    OutputRole,
    Parameter,
    StageInput,
    StageOutput,
    Tangent,
)
from autopar.passes.core.node_builder import aten, copy_nodes
from autopar.passes.pipeline_parallel.stage_assignment import StageAssignment, assign_stages


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
    """Splits the graph of a micro-batch after `PlaceStages`, partitioned or not.

    Raises:
        StrategyError: a stage is empty, or an earlier stage reads a forward value of a later one.
    """
    it = assign_stages(graph.copy(), stages)
    needed = [_needed(it, stage) for stage in range(stages)]
    late_reads = [
        [n for node in nodes if _is_late(it, node) for n in node.all_input_nodes if n in it.stage]
        for nodes in needed
    ]
    epilogue, prologue = _ancestors(it, it.epilogue.values()), _ancestors(it, it.prologue.values())
    first = sum(isinstance(role, MicrobatchPartial) for role in graph.outputs)
    read = (n for nodes in (*late_reads, epilogue, prologue) for n in nodes if n in it.stage)
    totals = {node: first + index for index, node in enumerate(dict.fromkeys(read))}
    sent, received = _transfers(it, needed)

    def end_graph(results: Mapping[OutputRole, fx.Node], nodes: Iterable[fx.Node]) -> TrainingGraph:
        terms = {role: (node,) for role, node in results.items()}
        given = {node: BatchTotal(index, True) for node, index in totals.items()}
        return _extract(it, terms, nodes, given, phase="forward")

    graphs = []
    for stage in range(stages):
        inputs: dict[fx.Node, InputRole] = {
            n: BatchTotal(totals[n], True) for n in late_reads[stage] if it.stage[n] != stage
        }
        inputs |= received[stage]
        results = {role: (node,) for role, node in sent[stage].items()} | dict(it.outputs[stage])
        for node, index in totals.items():
            if it.stage[node] == stage:
                results[MicrobatchPartial(index)] = (node,)
        graphs.append(_extract(it, results, (*needed[stage], *inputs), inputs))
    return PipelineStages(
        end_graph(it.prologue, prologue) if it.prologue else None,
        tuple(graphs),
        end_graph(it.epilogue, epilogue),
        frozenset(totals.values()),
    )


def _needed(it: StageAssignment, stage: int) -> dict[fx.Node, None]:
    """The nodes that a stage computes or reads."""

    def sources(node: fx.Node) -> list[fx.Node]:
        if _is_late(it, node):
            return [n for n in node.all_input_nodes if n not in it.stage]
        return node.all_input_nodes if it.computes(stage, node) else []

    own = [n for n, at in it.stage.items() if at == stage and n not in it.skipped]
    own += [term for terms in it.outputs[stage].values() for term in terms]
    return _closure(own, sources)


def _is_late(it: StageAssignment, node: fx.Node) -> bool:
    """Whether an operator reads staged values as totals over the batch."""
    return it.dependence[node] == "totals" and node.op == "call_function"


def _ancestors(it: StageAssignment, nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Nodes and their ancestors, up to staged values."""

    def sources(node: fx.Node) -> list[fx.Node]:
        if node in it.stage:
            return []
        if it.dependence[node] == "parameters":
            raise StrategyError(
                f"{node} is a parameter's value that every stage would have to return "
                f"({source_line(node)}): return a copy that is computed from inputs too"
            )
        return node.all_input_nodes

    return _closure(nodes, sources)


def _closure(
    nodes: Iterable[fx.Node], sources: Callable[[fx.Node], list[fx.Node]]
) -> dict[fx.Node, None]:
    """Nodes and, transitively, their sources."""
    found: dict[fx.Node, None] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += sources(node)
    return found


def _transfers(
    it: StageAssignment, needed: Sequence[Iterable[fx.Node]]
) -> tuple[list[dict[OutputRole, fx.Node]], list[dict[fx.Node, InputRole]]]:
    """The values that each stage sends and receives; stages in between forward a value."""
    sent: list[dict[OutputRole, fx.Node]] = [{} for _ in needed]
    received: list[dict[fx.Node, InputRole]] = [{} for _ in needed]
    readers: dict[fx.Node, list[int]] = {}
    for stage, nodes in enumerate(needed):
        for node in nodes:
            if not it.computes(stage, node):
                readers.setdefault(node, []).append(stage)
    for number, node in enumerate(sorted(readers)):
        own, phase, reading = it.stage[node], node.meta["phase"], readers[node]
        if phase == "backward":
            path = range(own, min(reading) - 1, -1)
        else:
            path = range(own, max(reading) + 1)
        if not set(reading) <= set(path):
            raise StrategyError(
                f"the cut goes through what cannot be cut: {node} of stage {own} is needed by "
                f"stage {min(reading)} ({source_line(node)}). Cut elsewhere (split_points=...)."
            )
        for stage in path[1:]:
            received[stage][node] = StageInput(number, phase)
        for stage in path[:-1]:
            sent[stage][StageOutput(number, phase)] = node
    return sent, received


def _extract(
    it: StageAssignment,
    results: Mapping[OutputRole, tuple[fx.Node, ...]],
    nodes: Iterable[fx.Node],
    received: Mapping[fx.Node, InputRole],
    phase: str = "",
) -> TrainingGraph:
    """The graph of some nodes and of sums of terms.

    Nodes in `received` are inputs; without `phase` forward and backward stay apart.
    """
    graph = it.graph
    roles = {**dict(zip(graph.placeholders, graph.inputs, strict=True)), **received}

    def phase_of(node: fx.Node) -> str:
        role = roles.get(node)
        if phase or isinstance(role, StageInput):
            return phase or role.phase  # type: ignore[union-attr]
        if role is None:
            late = node.meta["phase"] == "backward" or it.dependence[node] == "totals"
        else:
            late = isinstance(role, Tangent) or (isinstance(role, BatchTotal) and role.late)
        return "backward" if late else "forward"

    ordered = sorted(set(nodes))
    inputs = [node for node in ordered if node in roles]
    body = [node for node in ordered if node not in roles]
    body.sort(key=lambda node: phase_of(node) == "backward")
    new = fx.Graph()
    copies = copy_nodes(new, inputs, body)
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


def _sum(graph: fx.Graph, terms: list[fx.Node]) -> fx.Node:
    """The sum of several terms, written at the end of a graph."""
    total = terms[0]
    for term in terms[1:]:
        total = graph.call_function(aten.add.Tensor, (total, term))
        total.meta = dict(term.meta)
    return total
