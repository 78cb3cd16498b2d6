"""`split_stages`: the graph of each pipeline stage, with a prologue and an epilogue.

Each stage passes values on to the next stage, and gradients back to the one before. Every stage
computes values that depend on inputs alone. Stages return losses and new buffers as
`MicrobatchPartial`s, and the epilogue computes the returned values from their totals. The prologue
computes sums over the batch that depend on inputs alone, before any stage runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.core.ir.graph import TrainingGraph, has_batch_dim, source_line, tensors
from autopar.core.ir.roles import (
    BatchTotal,
    Gradient,
    Input,
    InputRole,
    MicrobatchPartial,
    Output,
    OutputRole,
    Parameter,
    StageInput,
    StageOutput,
    Tangent,
    Update,
)
from autopar.errors import StrategyError
from autopar.passes.core.collective_ops import is_name
from autopar.passes.core.node_builder import aten, copy_nodes, dense_like
from autopar.passes.pipeline_parallel.place_stages import backward_stage
from autopar.passes.pipeline_parallel.stage_dependence import LAYOUT_OPS, dependences, op_packet

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
    """Splits the graph of a micro-batch after `PlaceStages`, partitioned or not.

    Raises:
        StrategyError: a stage is empty, or an earlier stage reads a forward value of a later one.
    """
    return _Splitter(graph.copy(), stages).run()


class _Splitter:
    """Assigns operators and outputs to stages, and writes the graph of each."""

    def __init__(self, graph: TrainingGraph, num_stages: int) -> None:
        self.graph, self.num_stages = graph, num_stages
        self.dependence = dependences(graph)
        self.stage: dict[fx.Node, int] = {}  # of the operators that a single stage runs
        self.outputs: list[dict[OutputRole, Terms]] = [{} for _ in range(num_stages)]
        self.prologue: dict[OutputRole, fx.Node] = {}  # partials that depend on inputs alone
        self.epilogue: dict[OutputRole, fx.Node] = {}  # computed from totals over the batch
        self.skipped: set[fx.Node] = set()  # sums of gradients of several stages

    def assign(self) -> None:
        """Assigns every operator and output to a stage; updates `meta["stage"]` in place."""
        graph, stage, num_stages = self.graph, self.stage, self.num_stages
        for node in graph.calls():
            if self.dependence[node] != "staged":
                continue
            own = node.meta.get("stage")
            if node.meta["phase"] == "backward":
                own = backward_stage(node, own, self.dependence, num_stages)
            else:  # the recorded stage, or a later one that an operand requires
                earliest = max((stage[n] for n in node.all_input_nodes if n in stage), default=0)
                own = earliest if own is None or is_name(node) else max(own, earliest)
            stage[node] = node.meta["stage"] = own
        empty = sorted(set(range(num_stages)) - set(stage.values()))
        if empty:
            raise StrategyError(
                f"stage {empty[0]} of {num_stages} has nothing to do: the model has fewer layers "
                "than stages. Give a smaller pp or stages_per_rank."
            )
        for role, result in zip(graph.outputs, graph.results, strict=True):
            if result is None:
                continue
            own = stage.get(result, num_stages - 1)
            match role:
                case MicrobatchPartial(index) if BatchTotal(index, False) in graph.inputs:
                    self.prologue[role] = result
                case MicrobatchPartial():
                    self.outputs[own][role] = (result,)
                case Update(Input(index)):
                    raise StrategyError(
                        f"the model changes argument {index} in place, which a pipeline cannot do "
                        "for the caller: change a copy, or leave pp and micro_batches out"
                    )
                case Gradient():
                    for term in self.gradient_terms(result):
                        at = stage.get(term, num_stages - 1)
                        self.outputs[at][role] = (*self.outputs[at].get(role, ()), term)
                case Output() if self.dependence[result] != "totals" and (
                    has_batch_dim(result) or tensors(result)[0].dim()
                ):
                    self.outputs[own][role] = (result,)
                case _:
                    self.epilogue[role] = result

    def computes(self, stage: int, node: fx.Node) -> bool:
        own = self.stage.get(node, stage)
        if own >= stage or op_packet(node) not in LAYOUT_OPS or node.meta["phase"] == "backward":
            return own == stage
        source = node.args[0]  # later stages compute a view of a value that they receive
        if not isinstance(source, fx.Node) or source not in self.stage:
            return False
        before, after = tensors(source)[0], tensors(node)[0]
        return before.numel() == after.numel() and before.dtype == after.dtype

    def gradient_terms(self, gradient: fx.Node) -> Iterator[fx.Node]:
        """The terms of a gradient by stage; adds sums that nothing else reads to `skipped`."""
        stage = self.stage
        # Terms of a tied weight's gradient stay on their stages: the rank of the weight sums them
        # once, instead of in each micro-batch.
        if op_packet(gradient) is aten.add and gradient.meta["phase"] == "backward":
            terms = [n for n in gradient.args if isinstance(n, fx.Node) and n in stage]
            types = {(t.shape, t.dtype) for n in (*terms, gradient) for t in tensors(n)[:1]}
            alike = len(terms) == 2 and len(types) == 1
            if alike and any(stage[n] != stage[gradient] for n in terms):
                if self.skipped.issuperset(n for n in gradient.users if n.op != "output"):
                    self.skipped.add(gradient)
                for term in terms:
                    yield from self.gradient_terms(term)
                return
        yield gradient

    def run(self) -> PipelineStages:
        self.assign()
        stages = range(self.num_stages)
        needed = [self.needed(stage) for stage in stages]
        late = [
            [n for node in filter(self.is_late, nodes) for n in node.all_input_nodes]
            for nodes in needed
        ]
        ends = (self.epilogue, self.prologue)
        bodies = [self.ancestors(end.values()) for end in ends]
        read = dict.fromkeys(n for nodes in (*late, *bodies) for n in nodes if n in self.stage)
        first = sum(isinstance(role, MicrobatchPartial) for role in self.graph.outputs)
        totals = {node: BatchTotal(index, True) for index, node in enumerate(read, first)}
        sent, received = self.transfers(needed)
        graphs = []
        for stage in stages:
            totals_read = (n for n in late[stage] if self.stage.get(n, stage) != stage)
            inputs: dict[fx.Node, InputRole] = {n: totals[n] for n in totals_read}
            inputs |= received[stage]
            results: dict[OutputRole, Terms] = {r: (node,) for r, node in sent[stage].items()}
            results |= self.outputs[stage]
            for node, total in totals.items():
                if self.stage[node] == stage:
                    results[MicrobatchPartial(total.index)] = (node,)
            graphs.append(self.extract(results, (*needed[stage], *inputs), inputs))
        epilogue, prologue = (
            self.extract({role: (node,) for role, node in end.items()}, body, totals, "forward")
            for end, body in zip(ends, bodies, strict=True)
        )
        indices = frozenset(total.index for total in totals.values())
        return PipelineStages(prologue if self.prologue else None, tuple(graphs), epilogue, indices)

    def needed(self, stage: int) -> dict[fx.Node, None]:
        def sources(node: fx.Node) -> list[fx.Node]:
            if self.is_late(node):
                return [n for n in node.all_input_nodes if n not in self.stage]
            return node.all_input_nodes if self.computes(stage, node) else []

        own = [n for n, at in self.stage.items() if at == stage and n not in self.skipped]
        own += [term for terms in self.outputs[stage].values() for term in terms]
        return _closure(own, sources)

    def is_late(self, node: fx.Node) -> bool:
        return self.dependence[node] == "totals" and node.op == "call_function"

    def ancestors(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
        """Nodes and their ancestors, up to staged values."""

        def sources(node: fx.Node) -> list[fx.Node]:
            if node in self.stage:
                return []
            if self.dependence[node] == "parameters":
                raise StrategyError(
                    f"{node} is a parameter's value that every stage would have to return "
                    f"({source_line(node)}): return a copy that is computed from inputs too"
                )
            return node.all_input_nodes

        return _closure(nodes, sources)

    def transfers(
        self, needed: Sequence[Iterable[fx.Node]]
    ) -> tuple[list[dict[OutputRole, fx.Node]], list[dict[fx.Node, InputRole]]]:
        """The values that each stage sends and receives; stages in between forward a value."""
        sent: list[dict[OutputRole, fx.Node]] = [{} for _ in needed]
        received: list[dict[fx.Node, InputRole]] = [{} for _ in needed]
        readers: dict[fx.Node, list[int]] = {}
        for stage, nodes in enumerate(needed):
            for node in nodes:
                if not self.computes(stage, node):
                    readers.setdefault(node, []).append(stage)
        for number, node in enumerate(sorted(readers)):
            own, phase, reading = self.stage[node], node.meta["phase"], readers[node]
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

    def extract(
        self,
        results: Mapping[OutputRole, Terms],
        nodes: Iterable[fx.Node],
        received: Mapping[fx.Node, InputRole],
        phase: str = "",
    ) -> TrainingGraph:
        """The graph of some nodes and of sums of terms.

        Nodes in `received` are inputs; without `phase` forward and backward stay apart.
        """
        graph = self.graph
        roles = {**dict(zip(graph.placeholders, graph.inputs, strict=True)), **received}

        def phase_of(node: fx.Node) -> str:
            role = roles.get(node)
            if phase or isinstance(role, StageInput):
                return phase or role.phase  # type: ignore[union-attr]
            if role is None:
                late = node.meta["phase"] == "backward" or self.dependence[node] == "totals"
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
            if isinstance(roles.get(node), StageInput):
                # Messages arrive dense. With the strides of a slice, memory would count gaps that
                # are not there.
                copy.meta["val"] = dense_like(graph, node.meta["val"])
        new.output([_sum(new, [copies[term] for term in terms]) for terms in results.values()])
        # the gradient of a parameter may be the loss's own, beside which nothing reads it
        read = [*(roles[node] for node in inputs), *(getattr(r, "of", None) for r in results)]
        names = {role.name for role in read if isinstance(role, Parameter)}
        return replace(
            graph,
            graph=new,
            inputs=tuple(roles[node] for node in inputs),
            outputs=tuple(results),
            parameters={n: p for n, p in graph.parameters.items() if n in names},
        )


def _closure(
    nodes: Iterable[fx.Node], sources: Callable[[fx.Node], list[fx.Node]]
) -> dict[fx.Node, None]:
    found: dict[fx.Node, None] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += sources(node)
    return found


def _sum(graph: fx.Graph, terms: list[fx.Node]) -> fx.Node:
    total = terms[0]
    for term in terms[1:]:
        total = graph.call_function(aten.add.Tensor, (total, term))
        total.meta = dict(term.meta)
    return total
