"""`propagate`: placements along the batch axis, from inputs sharded by rows to every operator.

Data parallelism is typed here, by the rules that `passes/rules` proves: inputs lie `Shard(0)`,
parameters `Replicate`, and every operator takes the cheapest strategy that its rule allows, in
execution order. A reduction over rows comes out `Partial`; an operator that couples rows gets its
operands redistributed, and one without a rule gets them whole. So a value is row by row only where
a rule says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.cost_model.kernels.signature import describe_argument, moved_bytes
from autopar.ir.batch_slicing import BatchSlices
from autopar.ir.graph import TrainingGraph, Value, elements, operands
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Partial, Placement, Replicate, Shard
from autopar.ir.roles import Buffer, Gradient, Input, Output, Parameter, Tangent, Update
from autopar.passes.core.collective_ops import is_name, value_of
from autopar.passes.core.node_builder import is_view
from autopar.passes.data_parallel.redistribute import (
    BYTES_PER_SENT_BYTE,
    LATENCY,
    Move,
    move_cost,
    moves,
)
from autopar.passes.rules.batch_loops import batch_loops, batch_strategies, draws_random, is_cast
from autopar.passes.rules.loops import DimAccess, Loop, Operator, replicated, split_loop
from autopar.passes.rules.operators.partial_linear import EACH, TOGETHER, linear_strategies
from autopar.passes.rules.registry import is_supported

WHOLE, PART = Replicate(), Partial()
ITERATIONS_PER_BYTE = 8.0
"""Iterations of an operator's loops that cost as much as moving one byte of memory."""


PENDING_SUM = 0.9 * LATENCY
"""Cost of a partial value's later sum, which may share a message with others."""


@dataclass(frozen=True)
class BatchPlacements:
    """Placements of a graph along the batch axis.

    Attributes:
        op_strategies: strategies of operators that are not replicated, by node name.
        inputs: placement of every placeholder, by node name.
        returned: placement of every output of the model, by its index.
        gathered: operators that read rows of other slices, in order, by node name; and how many
            bytes these are.
        drawn: names of operators that draw random numbers for their own rows.
    """

    op_strategies: Mapping[str, OpStrategy]
    inputs: Mapping[str, Placement]
    outputs: Mapping[int, Placement]
    gathered_bytes: Mapping[str, int] = field(default_factory=dict)
    local_random: frozenset[str] = frozenset()


def propagate(
    graph: TrainingGraph, slices: BatchSlices, has_rows: Sequence[bool], kept: Sequence[int] = ()
) -> BatchPlacements:
    """Placements of every value of a graph captured at the whole batch.

    Args:
        graph: forward and backward of the whole batch.
        slices: of the batch.
        has_rows: for each flattened argument, whether its dim 0 runs over the rows.
        kept: outputs that are returned whole.
    """
    return _Propagation(graph, slices, has_rows, kept).run()


class _Propagation:
    """One walk over the graph in execution order."""

    def __init__(
        self,
        graph: TrainingGraph,
        slices: BatchSlices,
        has_rows: Sequence[bool],
        kept: Sequence[int],
    ) -> None:
        self.graph, self.slices, self.has_rows, self.kept = graph, slices, has_rows, kept
        self.at: dict[Value, Placement] = {}
        self.moved: dict[Value, set[Placement]] = {}
        self.op_strategies: dict[str, OpStrategy] = {}
        self.gathered: dict[str, int] = {}
        self.drawn: set[str] = set()
        self.loops: dict[object, list[Loop]] = {}
        self.chosen: dict[object, OpStrategy] = {}
        self.final = _only_gradients(graph)

    def run(self) -> BatchPlacements:
        inputs = dict(zip(self.graph.placeholders, self.graph.inputs, strict=True))
        tangents: list[fx.Node] = []
        for node, role in inputs.items():
            if isinstance(role, Tangent):
                tangents.append(node)
            over_rows = isinstance(role, Input) and self.has_rows[role.index]
            self.at[Value(node)] = Shard(0) if over_rows else WHOLE
        backward, returned = self.graph.backward_start, dict[int, Placement]()
        for node in self.graph.graph.nodes:
            if node is backward:
                returned = self.returned()
                for tangent in tangents:
                    role = inputs[tangent]
                    assert isinstance(role, Tangent)
                    self.at[Value(tangent)] = returned.get(role.index, WHOLE)
            if node.op == "get_attr":
                self.at[Value(node)] = WHOLE
            elif node.op == "call_function" and not is_name(node):
                self.visit(node)
        returned = returned or self.returned()
        self.sink(returned)
        return BatchPlacements(
            self.op_strategies,
            {node.name: self.at[Value(node)] for node in inputs},
            returned,
            self.gathered,
            frozenset(self.drawn),
        )

    def returned(self) -> dict[int, Placement]:
        """Placements of what the model returns: its rows as they lie, all else whole."""
        found: dict[int, Placement] = {}
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if isinstance(role, Output) and node is not None:
                placement = self.at[value_of(node)]
                has_rows = isinstance(placement, Shard) and role.index not in self.kept
                found[role.index] = placement if has_rows else WHOLE
            elif isinstance(role, Update) and node is not None and value_of(node) in self.at:
                self.moved.setdefault(value_of(node), set()).add(WHOLE)
        return found

    def sink(self, returned: Mapping[int, Placement]) -> None:
        """Computes on shards alone what all readers want sharded, from the last operator on.

        An operator on whole operands was left whole, since its readers were not known.
        """
        wanted: dict[Value, set[Placement]] = {}
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if node is not None:
                index = role.index if isinstance(role, Output) else -1
                wanted.setdefault(value_of(node), set()).add(returned.get(index, WHOLE))
        for node in reversed(list(self.graph.calls())):
            if is_name(node):
                continue
            reads = [value_of(source) for source in operands(node)]
            self.sink_one(node, reads, wanted.get(Value(node), set()))
            op_strategy = self.op_strategies.get(node.name)
            for place, value in enumerate(reads):
                wanted.setdefault(value, set()).add(
                    op_strategy.operands[place] if op_strategy else WHOLE
                )

    def sink_one(self, node: fx.Node, reads: Sequence[Value], wanted: set[Placement]) -> None:
        """Gives an operator on whole operands the strategy of the one shard that is read."""
        shard = next(iter(wanted), None)
        whole = node.name not in self.op_strategies and all(
            self.at[value] == WHOLE for value in reads
        )
        if (
            len(wanted) > 1
            or not isinstance(shard, Shard)
            or not whole
            or draws_random(Operator.of(node))
        ):
            return
        if len(elements(node)) > 1 or not all(isinstance(v.tensor, torch.Tensor) for v in reads):
            return
        known = is_supported(node.target)
        for loop in self.loops_of(Operator.of(node), _likeness(node)) if known else ():
            (at,) = loop.results
            if loop.lowering or not isinstance(at, DimAccess) or at.dim != shard.dim:
                continue
            pieces, rest = divmod(shard.interleave, at.interleave)
            fits = not rest and (loop.interleavable or pieces == 1)
            if fits and loop.size and self.slices.divides(loop.size, pieces):
                self.op_strategies[node.name] = split_loop(loop.interleaved(pieces))
                self.at[Value(node)] = shard
                return

    def visit(self, node: fx.Node) -> None:
        """Chooses the strategy of an operator."""
        reads = [value_of(source) for source in operands(node)]
        if not all(isinstance(v.tensor, torch.Tensor) for v in reads):
            for place in range(len(elements(node))):
                self.at[Value(node, place)] = WHOLE
            return
        op_strategy = self.choose(node, reads)
        for value, wanted in zip(reads, op_strategy.operands, strict=True):
            self.move(node, value, wanted)
        if op_strategy != replicated(Operator.of(node)):
            self.op_strategies[node.name] = op_strategy
        if draws_random(Operator.of(node)) and any(
            isinstance(p, Shard) for p in op_strategy.results
        ):
            self.drawn.add(node.name)
        for place, placement in enumerate(op_strategy.results):
            self.at[Value(node, place)] = placement

    def move(self, reader: fx.Node, value: Value, wanted: Placement) -> None:
        """Notes how a value is redistributed for a reader."""
        for _, before, after in self.path(value, wanted):
            if after in self.moved.get(value, ()):
                continue
            self.moved.setdefault(value, set()).add(after)
            if isinstance(before, Shard) and not isinstance(after, Partial):
                size = value.tensor.numel() * value.tensor.element_size()
                self.gathered[reader.name] = self.gathered.get(reader.name, 0) + size

    def path(self, value: Value, wanted: Placement) -> list[Move]:
        found = moves(self.at[value], wanted, self.slices)
        assert found is not None, f"{value.node} cannot be moved to {wanted}"
        return found

    def choose(self, node: fx.Node, reads: Sequence[Value]) -> OpStrategy:
        """The cheapest strategy of an operator, given where its operands lie."""
        have = tuple(self.at[value] for value in reads)
        whole = all(placement == WHOLE for placement in have)
        likeness = _likeness(node)
        known = tuple(frozenset(self.moved.get(value, ())) for value in reads)
        same = tuple(reads.index(value) for value in reads)
        last = any(Value(node, place) in self.final for place in range(len(elements(node))))
        key = (likeness, have, known, same, last)
        if key not in self.chosen:
            options = list(self.strategies(node, likeness, have, whole))
            prices = [
                self.price(node, reads, op_strategy, whole, last, likeness)
                for op_strategy in options
            ]
            self.chosen[key] = options[prices.index(min(prices))]
        return self.chosen[key]

    def strategies(
        self, node: fx.Node, likeness: object, have: Sequence[Placement], whole: bool
    ) -> Iterator[OpStrategy]:
        """Every strategy of an operator that whole units of the batch allow.

        An operator without a rule is not run to find one where all its operands are whole.
        """
        operator = Operator.of(node)
        found = [replicated(operator)]
        known = not whole or is_supported(operator.target)
        for loop in self.loops_of(operator, likeness) if known else ():
            found += [split_loop(cut) for cut in self.cuts(loop, have)]
        if not draws_random(Operator.of(node)):
            linear = [*linear_strategies(operator), *batch_strategies(operator)]
            late = node.meta["phase"] == "backward"
            found += [
                op_strategy for op_strategy in linear if late or PART not in op_strategy.operands
            ]
        for op_strategy in dict.fromkeys(found):
            pairs = zip(have, op_strategy.operands, strict=True)
            if all(moves(before, after, self.slices) is not None for before, after in pairs):
                yield op_strategy

    def loops_of(self, operator: Operator, likeness: object) -> list[Loop]:
        if likeness not in self.loops:
            self.loops[likeness] = batch_loops(operator)
        return self.loops[likeness]

    def cuts(self, loop: Loop, have: Sequence[Placement]) -> Iterator[Loop]:
        """A loop in as many interleaved pieces as some operand lies in, and in one."""
        pieces = {1}
        for at, placement in zip(loop.operands, have, strict=True):
            if (
                isinstance(at, DimAccess)
                and isinstance(placement, Shard)
                and placement.dim == at.dim
            ):
                inside, rest = divmod(placement.interleave, at.interleave)
                if not rest and loop.interleavable:
                    pieces.add(inside)
        for count in sorted(pieces):
            if loop.size and self.slices.divides(loop.size, count):
                yield loop.interleaved(count)

    def price(
        self,
        node: fx.Node,
        reads: Sequence[Value],
        op_strategy: OpStrategy,
        whole: bool,
        last: bool,
        likeness: object,
    ) -> float:
        """The cost of a strategy in bytes of memory traffic, what follows from it included."""
        total = 0.0
        for value, wanted in dict(zip(reads, op_strategy.operands, strict=True)).items():
            for move in self.path(value, wanted):
                if move[2] not in self.moved.get(value, ()):
                    total += move_cost(move, value.tensor, self.slices)
        divided = any(isinstance(p, Shard) for p in (*op_strategy.operands, *op_strategy.results))
        total += self.work(node, likeness) / (self.slices.count if divided else 1)
        total += (
            LATENCY if draws_random(Operator.of(node)) and not divided else 0.0
        )  # slices agree on what is drawn
        made = [
            (p, t)
            for p, t in zip(op_strategy.results, elements(node), strict=True)
            if t is not None
        ]
        for placement, tensor in made:
            if isinstance(placement, Partial) and not last:
                total += (
                    PENDING_SUM + 2 * BYTES_PER_SENT_BYTE * tensor.numel() * tensor.element_size()
                )
            elif whole and isinstance(placement, Shard):  # readers may want it whole again
                total += move_cost(("gather", placement, WHOLE), tensor, self.slices)
            elif placement == WHOLE and last:
                total += 2 * tensor.numel() * tensor.element_size()
        return total

    def work(self, node: fx.Node, likeness: object) -> float:
        """Bytes that an operator moves, or its iterations in bytes if these take longer."""
        if is_view(node):
            return 0.0
        loops = self.loops.get(likeness, [])
        iterations = math.prod(loop.size for loop in loops if not loop.lowering)
        return max(float(moved_bytes(node)), iterations / ITERATIONS_PER_BYTE)


def _only_gradients(graph: TrainingGraph) -> frozenset[Value]:
    """Gradients of parameters, and what nothing else is computed of: they stay Partial."""
    found = {
        value_of(node)
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if isinstance(role, Gradient) and isinstance(role.of, Parameter) and node is not None
    }
    fixed = _of_parameters(graph)
    for node in reversed(list(graph.calls())):
        readers = [user for user in node.users if user.op != "output"]
        if readers and all(Value(r) in found and _is_linear(r, node, fixed) for r in readers):
            found.add(Value(node))
    return frozenset(found)


def _of_parameters(graph: TrainingGraph) -> frozenset[fx.Node]:
    """Nodes that are computed of parameters, buffers and constants alone."""
    found: set[fx.Node] = set()
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            known = isinstance(roles[node], (Parameter, Buffer))
        else:
            known = found.issuperset(node.all_input_nodes)
        if known:
            found.add(node)
    return frozenset(found)


def _is_linear(reader: fx.Node, node: fx.Node, fixed: frozenset[fx.Node]) -> bool:
    """Whether partial values of a node pass through a reader, its other operands being fixed."""
    if reader.target in TOGETHER or is_cast(Operator.of(reader)):
        return True
    places = [place for place, source in enumerate(operands(reader)) if source is node]
    each = len(places) == 1 and places[0] in dict[Any, Any](EACH).get(reader.target, ())
    return each and fixed.issuperset(n for n in operands(reader) if n is not node)


def _likeness(node: fx.Node) -> tuple[object, ...]:
    """All that the loops of an operator depend on."""
    return node.target, describe_argument(node.args), describe_argument(node.kwargs)


def batch_dims_after(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """For each result of an operator on one slice, the dims over rows, by its rule."""
    given = [(n.meta.get("batch_dims") or ((),))[0] for n in operands(node)]
    none: tuple[tuple[int, ...], ...] = ((),) * len(elements(node))
    known = all(isinstance(n.meta["val"], torch.Tensor) for n in operands(node))
    if not (known and any(given) and is_supported(node.target)):
        return none
    for loop in _matching(batch_loops(Operator.of(node)), given):
        return tuple((at.dim,) if isinstance(at, DimAccess) else () for at in loop.results)
    return none


def _matching(loops: Iterable[Loop], given: Sequence[tuple[int, ...]]) -> Iterator[Loop]:
    for loop in loops:
        places = [(at.dim,) if isinstance(at, DimAccess) else () for at in loop.operands]
        if list(map(tuple, given)) == places:
            yield loop
