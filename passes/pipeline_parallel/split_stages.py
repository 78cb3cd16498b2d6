"""A graph whose operators have stages, cut into the graphs of these stages.

What a later stage needs of an earlier one is sent on from stage to stage, and gradients go back
the same way. What depends on inputs alone every stage computes for itself. Small values that all
ranks are to return (losses, new values of buffers) leave the stages as `MicrobatchPartial`s, of
which the epilogue makes what is returned; sums over the batch that are known from the inputs come
from the prologue, before anything else runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from autopar.errors import StrategyError
from autopar.ir.graph import TrainingGraph, has_batch_dim, tensors, user_line
from autopar.ir.roles import (
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
from autopar.passes.core.collective_ops import is_name
from autopar.passes.core.node_builder import aten
from autopar.passes.pipeline_parallel.place_stages import backward_stage
from autopar.passes.pipeline_parallel.stage_dependence import LAYOUT_OPS, dependences, op_packet


@dataclass(frozen=True)
class PipelineStages:
    """A graph cut into stages.

    Attributes:
        prologue: yields the parts of totals that are known from the inputs; None if there are none.
        stages: the graph of each stage, of one micro-batch.
        epilogue: makes of totals the outputs that have no rows, and new values of buffers.
        same: the parts that are the same for every micro-batch and data-parallel rank.
        makers: the stage that yields each part; those of the prologue are left out.
        late: whether some backward needs what all forwards add up.
    """

    prologue: TrainingGraph | None
    stages: tuple[TrainingGraph, ...]
    epilogue: TrainingGraph
    replicated_partials: frozenset[int]
    partial_stage: dict[int, int]
    has_late_totals: bool

    @cached_property
    def output_stage(self) -> dict[int, int]:
        """The stage that makes each output that leaves it as it is, by index."""
        graphs = enumerate(self.stages)
        return {r.index: s for s, g in graphs for r in g.outputs if isinstance(r, Output)}

    @cached_property
    def tangents(self) -> frozenset[int]:
        """The outputs that gradients may enter by."""
        return frozenset(r.index for g in self.stages for r in g.inputs if isinstance(r, Tangent))

    @cached_property
    def can_interleave_backward(self) -> bool:
        """Whether backwards may run among the forwards: one loss, that nothing else depends on."""
        losses = self.tangents - set(self.output_stage)
        return len(self.tangents) == len(losses) == 1 and not self.has_late_totals


def split_stages(graph: TrainingGraph, stages: int) -> PipelineStages:
    """Cuts a graph that `place_stages` went over, and that may be partitioned since.

    Raises:
        StrategyError: a stage has nothing to do, or the cut goes through what cannot be cut.
    """
    return _StageSplitter(graph.copy(), stages).split()


class _StageSplitter:
    """The work under way."""

    def __init__(self, graph: TrainingGraph, count: int) -> None:
        self.graph, self.count = graph, count
        self.order = {node: place for place, node in enumerate(graph.graph.nodes)}
        self.roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self.kinds = dependences(graph)
        self.stage: dict[fx.Node, int] = {}
        for node in graph.calls():
            if self.kinds[node] == "staged":
                self.stage[node] = node.meta["stage"] = self.place(node)
        self.results: list[dict[OutputRole, fx.Node]] = [{} for _ in range(count)]
        self.ending: dict[OutputRole, fx.Node] = {}
        self.parts: dict[OutputRole, fx.Node] = {}
        self.totals: dict[fx.Node, int] = {}
        self.makers: dict[int, int] = {}
        self.needs: list[dict[fx.Node, None]] = [{} for _ in range(count)]
        self.read_late: list[set[fx.Node]] = [set() for _ in range(count)]
        self.in_parts: set[fx.Node] = set()  # gradients that no stage adds up

    def place(self, node: fx.Node) -> int:
        """The stage of a node, no earlier than that of what it reads."""
        wanted = node.meta.get("stage")
        if node.meta["phase"] == "backward":
            return backward_stage(node, wanted, self.kinds, self.count)
        read = [self.stage[n] for n in node.all_input_nodes if n in self.stage]
        return max(read, default=0) if wanted is None or is_name(node) else max(wanted, *read, 0)

    def split(self) -> PipelineStages:
        empty = sorted(set(range(self.count)) - set(self.stage.values()))
        if empty:
            raise StrategyError(
                f"stage {empty[0]} of {self.count} has nothing to do: the model has fewer layers "
                "than stages. Give a smaller pp or stages_per_rank."
            )
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if node is not None:
                self.returned(role, node)
        for index in range(self.count):
            self.needs[index] = self.needed(index)
        epilogue = self.end_graph(self.ending)
        prologue = self.end_graph(self.parts) if self.parts else None
        self.wire()
        stages = tuple(self.stage_graph(index) for index in range(self.count))
        late = any(isinstance(r, BatchTotal) and r.late for g in stages for r in g.inputs)
        same = frozenset(self.totals.values())
        return PipelineStages(prologue, stages, epilogue, same, self.makers, late)

    # What is returned, and by whom.

    def returned(self, role: OutputRole, node: fx.Node) -> None:
        """Gives what is returned to the stage that makes it, or to prologue or epilogue."""
        kind, last = self.kinds[node], self.count - 1
        match role:
            case MicrobatchPartial(index) if BatchTotal(index, False) in self.graph.inputs:
                self.parts[role] = node
            case MicrobatchPartial(index):
                self.makers[index] = maker = self.stage.get(node, last)
                self.results[maker][role] = node
            case Update(Input(index)):
                raise StrategyError(
                    f"the model changes argument {index} in place, which a pipeline cannot do for "
                    "the caller: change a copy, or leave pp and micro_batches out"
                )
            case Gradient():
                for stage, part in self.contributions(node):
                    self.add_gradient(stage, role, part)
            case Output() if kind != "late" and (has_batch_dim(node) or tensors(node)[0].dim()):
                self.results[self.stage.get(node, last)][role] = node
            case _:
                self.ending[role] = node

    def contributions(self, node: fx.Node) -> Iterable[tuple[int, fx.Node]]:
        """A gradient as what each stage adds to it."""
        here = self.stage.get(node, self.count - 1)
        if op_packet(node) is aten.add and node.meta["phase"] == "backward":
            terms = [n for n in node.args if isinstance(n, fx.Node) and n in self.stage]
            alike = len(terms) == 2 and all(_same_type(n, node) for n in terms)
            if alike and any(self.stage[n] != here for n in terms):
                if self.in_parts.issuperset(n for n in node.users if n.op != "output"):
                    self.in_parts.add(node)
                return [found for n in terms for found in self.contributions(n)]
        return [(here, node)]

    def add_gradient(self, stage: int, role: Gradient, node: fx.Node) -> None:
        """Adds to what a stage returns as a gradient."""
        known = self.results[stage].get(role)
        if known is not None:
            with self.graph.graph.inserting_before(self.graph.output_node):
                total = self.graph.graph.call_function(aten.add.Tensor, (known, node))
            total.meta = dict(node.meta)
            self.kinds[total], self.stage[total] = "staged", stage
            self.order[total] = len(self.order)
            node = total
        self.results[stage][role] = node

    # What a stage needs.

    def base(self, node: fx.Node, stage: int) -> bool:
        """Whether a stage makes a value of an earlier one for itself: the view of one it gets."""
        if op_packet(node) not in LAYOUT_OPS or node.meta["phase"] == "backward":
            return False
        source = node.args[0]
        return (
            self.stage[node] < stage
            and isinstance(source, fx.Node)
            and source in self.stage
            and tensors(source)[0].numel() == tensors(node)[0].numel()
            and tensors(source)[0].dtype == tensors(node)[0].dtype
        )

    def own(self, node: fx.Node, stage: int) -> bool:
        """Whether a stage computes a node."""
        return node not in self.stage or self.stage[node] == stage or self.base(node, stage)

    def needed(self, stage: int) -> dict[fx.Node, None]:
        """All nodes that a stage computes, takes or receives."""
        found: dict[fx.Node, None] = {}
        todo = [n for n, at in self.stage.items() if at == stage and n not in self.in_parts]
        todo += self.results[stage].values()
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found[node] = None
            if self.kinds[node] == "late" and node.op == "call_function":
                todo += [n for n in node.all_input_nodes if n not in self.stage]
                for n in node.all_input_nodes:
                    if n in self.stage:
                        self.total_of(n)
                        self.read_late[stage].add(n)
            elif self.own(node, stage):
                todo += node.all_input_nodes
        return found

    def total_of(self, node: fx.Node) -> None:
        """Makes a part of a value that a stage makes and the epilogue reads."""
        if node not in self.totals:
            known = [r.index for r in self.graph.outputs if isinstance(r, MicrobatchPartial)]
            index = len(known) + len(self.totals)
            self.totals[node] = index
            self.makers[index] = self.stage[node]
            self.results[self.stage[node]][MicrobatchPartial(index)] = node

    def closure(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Nodes and all that they depend on, short of what stages make."""
        found: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.add(node)
            if node in self.stage:
                self.total_of(node)
            elif self.kinds[node] == "held":
                raise StrategyError(
                    f"{node} is a parameter's value that every stage would have to return "
                    f"({user_line(node)}): return a copy that is computed from inputs too"
                )
            else:
                todo += node.all_input_nodes
        return found

    # What travels.

    def wire(self) -> None:
        """Numbers what travels between stages, and lets those on the way pass it on."""
        self.sent: list[dict[OutputRole, fx.Node]] = [{} for _ in range(self.count)]
        self.received: list[dict[fx.Node, StageInput]] = [{} for _ in range(self.count)]
        travels = sorted(
            {n for s in range(self.count) for n in self.needs[s] if not self.own(n, s)},
            key=self.order.__getitem__,
        )
        for number, node in enumerate(travels):
            at, phase = self.stage[node], node.meta["phase"]
            wanted = [
                s for s in range(self.count) if node in self.needs[s] and not self.own(node, s)
            ]
            if phase == "backward":
                takers, givers = range(min(wanted), at), range(min(wanted) + 1, at + 1)
            else:
                takers, givers = range(at + 1, max(wanted) + 1), range(at, max(wanted))
            if not {*wanted} <= {*takers}:
                raise StrategyError(
                    f"the cut goes through what cannot be cut: {node} of stage {at} is needed by "
                    f"stage {min(wanted)} ({user_line(node)}). Cut elsewhere (cuts=...)."
                )
            for s in takers:
                self.received[s][node] = StageInput(number, phase)
            for s in givers:
                self.sent[s][StageOutput(number, phase)] = node

    def stage_graph(self, stage: int) -> TrainingGraph:
        """The graph of one stage."""
        results = self.sent[stage] | self.results[stage]
        given: dict[fx.Node, InputRole] = dict(self.received[stage])
        for node in self.read_late[stage]:
            if node not in given and self.stage[node] != stage:
                given[node] = BatchTotal(self.totals[node], True)
        return self.extract(results, {*self.needs[stage], *given}, given)

    def end_graph(self, results: dict[OutputRole, fx.Node]) -> TrainingGraph:
        """The graph of prologue or epilogue."""
        nodes = self.closure(results.values())
        totals = {n: BatchTotal(self.totals[n], True) for n in nodes if n in self.stage}
        return self.extract(results, nodes, totals, ends=True)

    def extract(
        self,
        results: dict[OutputRole, fx.Node],
        nodes: set[fx.Node],
        received: Mapping[fx.Node, InputRole],
        ends: bool = False,
    ) -> TrainingGraph:
        """A graph of some of the nodes, others being received."""
        given: dict[fx.Node, tuple[InputRole, str]] = {}
        for node in sorted(nodes, key=self.order.__getitem__):
            role = received.get(node) or self.roles.get(node)
            if role is not None:
                given[node] = (role, "forward" if ends else self.phase_of(role))
        body = [n for n in nodes if n not in given and n.op != "output"]
        body.sort(key=lambda n: (not ends and self.is_backward(n), self.order[n]))
        new = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node, (_, phase) in given.items():
            copies[node] = new.placeholder(node.name)
            copies[node].meta = {**node.meta, "phase": phase}
        for node in body:
            copies[node] = new.node_copy(node, lambda n: copies[n])
            if ends or self.is_backward(node):
                copies[node].meta["phase"] = "forward" if ends else "backward"
        new.output([copies[n] for n in results.values()])
        names = {r.name for r, _ in given.values() if isinstance(r, Parameter)}
        return replace(
            self.graph,
            graph=new,
            inputs=tuple(role for role, _ in given.values()),
            outputs=tuple(results),
            parameters={n: p for n, p in self.graph.parameters.items() if n in names},
        )

    def is_backward(self, node: fx.Node) -> bool:
        """Whether a node runs in the backward of a stage."""
        return node.meta["phase"] == "backward" or self.kinds[node] == "late"

    @staticmethod
    def phase_of(role: InputRole) -> str:
        """When an input of a stage comes."""
        if isinstance(role, StageInput):
            return role.phase
        late = isinstance(role, Tangent) or (isinstance(role, BatchTotal) and role.late)
        return "backward" if late else "forward"


def _same_type(one: fx.Node, other: fx.Node) -> bool:
    a, b = tensors(one)[0], tensors(other)[0]
    return a.shape == b.shape and a.dtype == b.dtype
