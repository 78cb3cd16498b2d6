"""Partitions a graph of the whole batch: the program of one slice, exact by its placements."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.common.notices import NumericsNote
from autopar.ir.batch_slicing import BATCH, BatchSlices
from autopar.ir.graph import TrainingGraph, Value, dense_strides, elements, source_line
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Partial, Placement, Replicate, Shard, Varying
from autopar.ir.roles import (
    BatchFraction,
    BatchIndex,
    Gradient,
    Input,
    InputRole,
    Output,
    OutputRole,
    Parameter,
    Tangent,
    Update,
)
from autopar.passes.core.collective_ops import (
    STARTS,
    is_name,
    start_all_to_all,
    start_reduce_scatter,
    value_of,
)
from autopar.passes.core.node_builder import call, fake_like, is_random
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.data_parallel.propagate import BatchPlacements, batch_dims_after, propagate
from autopar.passes.data_parallel.redistribute import BatchRedistributor, moves
from autopar.passes.rules.batch_loops import draws_random
from autopar.passes.rules.local_args import local_shape
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS
from autopar.passes.tensor_parallel.partition_axis import Partitioner

WHOLE, PART, V = Replicate(), Partial(), Varying()


@dataclass(frozen=True)
class PartitionBatch(Pass):
    """Turns a graph captured at the whole batch into that of one slice.

    Before: the graph of the whole batch. After: inputs with rows, and all that is computed row by
    row, are this slice's; what couples rows stands between collectives over the batch axis.
    Gradients of parameters are Partial, returned values without rows are whole. Every node has
    `meta["placement"]` and `meta["batch_dims"]`. Tier: exact, but for the numbers that are drawn.

    Attributes:
        slices: of the batch, and which of them this is.
        has_rows: for each flattened argument, whether its dim 0 runs over the rows.
        kept: outputs that stay in the model, so that every rank needs all rows of them.
    """

    slices: BatchSlices
    has_rows: tuple[bool, ...]
    whole_outputs: tuple[int, ...] = ()

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to `graph`, which stays as it is."""
        placements = propagate(graph, self.slices, self.has_rows, self.whole_outputs)
        return PassResult(_BatchPartitioner(graph, self.slices, placements).run())


class _BatchPartitioner(Partitioner):
    """One walk over the graph, which writes that of a slice."""

    def __init__(
        self, graph: TrainingGraph, slices: BatchSlices, placements: BatchPlacements
    ) -> None:
        super().__init__(graph, BATCH, slices.axis_size, slices.index, placements.op_strategies)
        self.slices, self.placements = slices, placements
        self.extra: dict[InputRole, fx.Node] = {}

    # Inputs.

    def input(self, node: fx.Node, role: object) -> None:
        """A placeholder, at this slice's rows where it has rows."""
        placement, copy = self.placements.inputs[node.name], self.copied(node)
        if isinstance(placement, Shard):
            whole = node.meta["val"]
            shape = local_shape(whole.shape, placement, self.ranks, self.rank)
            strides = dense_strides(shape, whole.stride())
            copy.meta["val"] = whole.new_empty_strided(shape, strides)
        self.typed(copy, placement)
        self.keep(node, placement, copy)

    def constant(self, node: fx.Node) -> None:
        """A tensor that the model made in its code: whole on every slice."""
        copy = self.copied(node)
        self.typed(copy, WHOLE)
        self.keep(node, WHOLE, copy)

    def index(self) -> fx.Node:
        """The placeholder of this slice's place."""
        return self.extra_input(
            BatchIndex(), "batch_index", (self.slices.local_units,), torch.int64
        )

    def weight(self) -> fx.Node:
        """The placeholder of this slice's share of the rows."""
        return self.extra_input(BatchFraction(), "row_weight", (), torch.float64)

    def extra_input(
        self, role: InputRole, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> fx.Node:
        """A placeholder that only a slice has, written when it is first asked for."""
        if role not in self.extra:
            last = [n for n in self.new.nodes if n.op == "placeholder"][-1]
            with self.new.inserting_after(last):
                node = self.new.placeholder(name)
            fake = fake_like(self.old, shape, dtype)
            node.meta = {"val": fake, "phase": "forward", "block": "", "source": None}
            node.meta |= {"placement": V, "batch_dims": ((),)}
            self.extra[role] = node
        return self.extra[role]

    def begin_backward(self) -> None:
        """Gradients that enter by rows are those of a mean over all slices, as of ranks' losses."""
        first = self.old.backward_start
        for role, node in zip(self.old.inputs, self.old.placeholders, strict=True):
            value = Value(node)
            if isinstance(role, Tangent) and isinstance(self.made[value][1], Shard):
                tangent, placement = self.made[value]
                end = self.last
                weighed = self.redistribution(first).share(tangent)
                self.mark(end)
                self.made[value] = (self.typed(weighed, placement), placement)

    # Operators.

    def operator(self, node: fx.Node) -> None:
        """One operator on what this slice holds; what all draw whole, the first slice draws."""
        super().operator(node)
        if is_name(node) or not is_random(node) or not draws_random(Operator.of(node)):
            return
        op_strategy = self.op_strategies.get(node.name)
        if op_strategy is None or not any(isinstance(p, Shard) for p in op_strategy.results):
            self.agree(node)

    def reduce(self, node: fx.Node) -> None:
        """Gradients stay Partial: they are summed once a step, with those of other parameters."""

    def agree(self, node: fx.Node) -> None:
        """Gives every slice the random numbers of the first."""
        for place, fake in enumerate(elements(node)):
            if fake is None:
                continue
            value = Value(node, place)
            drawn, _ = self.made[value]
            if node in self.tuples:
                drawn = call(self.new, node, operator.getitem, drawn, place)
            end, write = self.last, self.redistribution(node)
            (agreed,) = write.reduce([write.keep_first(drawn)])
            self.mark(end)
            self.made[value] = (agreed, WHOLE)

    def own(
        self, node: fx.Node, whole: Operator, op_strategy: OpStrategy, shards: list[fx.Node]
    ) -> None:
        """A custom lowering."""
        end = self.last
        made = CUSTOM_LOWERINGS[op_strategy.lowering].emit(
            self.new, node, whole, op_strategy, shards, self.ranks, self.rank, self.axis
        )
        self.mark(end, own=True)
        for place, result in enumerate(made):
            if result is not None:
                result = self.dtensor_like(result, elements(node)[place], node)
                self.mark(end, own=True)
                self.typed(result, op_strategy.results[place])
                self.made[Value(node, place)] = (result, op_strategy.results[place])

    def write(
        self, node: fx.Node, target: Any, args: Any, kwargs: Any, placements: Sequence[Placement]
    ) -> None:
        """The operator that stands for a node."""
        end = self.last
        super().write(node, target, args, kwargs, placements)
        (copy,) = self.since(end)
        self.typed(copy, *placements)

    def element(self, node: fx.Node) -> None:
        """An element of a tuple, taken where it was taken."""
        end = self.last
        super().element(node)
        for copy in self.since(end):
            self.typed(copy, self.made[value_of(node)][1])

    def viewable(self, local: Operator, node: fx.Node) -> Operator:
        """A view of a shard, copied if its strides do not allow what those of the whole did."""
        end = self.last
        made = super().viewable(local, node)
        for copy in self.since(end):
            source = copy.all_input_nodes[0]
            copy.meta |= {key: source.meta[key] for key in ("placement", "batch_dims")}
        return made

    # Redistribution.

    def redistribution(self, like: fx.Node) -> BatchRedistributor:
        return BatchRedistributor(self.new, like, self.slices, self.index, self.weight)

    def operand(self, value: Value, wanted: Placement, reader: fx.Node) -> fx.Node:
        """A value as its reader wants it, redistributed where nobody wanted it so before."""
        node, placement = self.made[value]
        path = moves(placement, wanted, self.slices)
        if path is None:
            raise ValueError(f"{reader} wants {value.node} as {wanted}, which is {placement}")
        for move in path:
            key = (value, move[2])
            if key not in self.converted:
                end = self.last
                made = self.redistribution(reader).write(move, node, tuple(value.tensor.shape))
                if move[2] == wanted:
                    self.mark(end)
                    made = self.dtensor_like(made, value.tensor, reader)
                self.mark(end)
                self.converted[key] = self.typed(made, move[2])
            node = self.converted[key]
        return node

    # What is returned.

    def returned(self, phase: str) -> dict[OutputRole, fx.Node | None]:
        """What a phase returns: rows as they lie, gradients Partial, sums in one message."""
        end, found = self.last, dict[OutputRole, fx.Node | None]()
        sums: dict[Value, fx.Node] = {}
        wanted: dict[OutputRole, tuple[fx.Node, Placement]] = {}
        for role, node in zip(self.old.outputs, self.old.results, strict=True):
            late = isinstance(role, Gradient) or (
                node is not None and node.meta.get("phase") == "backward"
            )
            if late != (phase == "backward"):
                continue
            found[role] = None
            if node is None:
                continue
            value = value_of(node)
            wanted[role] = (node, self.wanted(role))
            is_sum = self.made[value][1] == PART and wanted[role][1] == WHOLE
            if is_sum and (value, WHOLE) not in self.converted:
                sums[value] = node
        self.sum_together(sums)
        for role, (node, placement) in wanted.items():
            found[role] = self.operand(value_of(node), placement, node)
        for node in self.since(end):
            node.meta["phase"] = phase
        return found

    def sum_together(self, sums: dict[Value, fx.Node]) -> None:
        """Reduces several values in one message."""
        if len(sums) < 2:
            return
        end, like = self.last, next(iter(sums.values()))
        made = self.redistribution(like).reduce([self.made[value][0] for value in sums])
        self.mark(end)
        for value, node in zip(sums, made, strict=True):
            self.converted[value, WHOLE] = self.typed(node, WHOLE)

    def wanted(self, role: OutputRole) -> Placement:
        """The placement in which a value is returned."""
        match role:
            case Output(index):
                return self.placements.outputs[index]
            case Gradient(Parameter()):
                return PART
            case Gradient(Input() as of):
                placement = self.placement_of(of)
                return PART if placement == WHOLE and self.slices.over_time else placement
            case Update(Input() as of):
                return self.placement_of(of)
        return WHOLE

    def placement_of(self, role: Input) -> Placement:
        """The placement of an argument of the call."""
        node = self.old.placeholder(role)
        assert node is not None
        return self.placements.inputs[node.name]

    # Types of what was written.

    def typed(self, node: fx.Node, *placements: Placement) -> fx.Node:
        """Notes on a node how its results lie, and which of their dims run over rows."""
        first = placements[0] if placements else WHOLE
        node.meta["placement"] = V if isinstance(first, Shard) else first
        node.meta["batch_dims"] = tuple(
            (p.dim,) if isinstance(p, Shard) else () for p in placements
        )
        return node

    def mark(self, end: fx.Node, own: bool = False) -> None:
        """Types what was written since a node: what is received is whole, the rest this slice's.

        With `own`, what is computed of whole values may depend on the slice, too.
        """
        for node in self.since(end):
            if "placement" in node.meta:
                continue
            kinds = {n.meta["placement"] for n in node.all_input_nodes} - {WHOLE}
            rows: tuple[tuple[int, ...], ...] = ((),) * len(elements(node))
            if node.target in (start_reduce_scatter, start_all_to_all):
                node.meta |= {"placement": V, "batch_dims": rows}
                continue
            received = node.target in STARTS or (not kinds and is_name(node))
            if received or not (kinds or own):
                node.meta |= {"placement": WHOLE, "batch_dims": rows}
            else:
                rows = rows if is_name(node) else batch_dims_after(node)
                node.meta |= {"placement": kinds.pop() if len(kinds) == 1 else V}
                node.meta["batch_dims"] = rows

    # The whole.

    def finished(self) -> TrainingGraph:
        """The graph of the slice."""
        return replace(
            self.old,
            graph=self.new,
            inputs=(*self.old.inputs, *self.extra),
            partitioned=(*self.old.partitioned, BATCH),
            notes=(*self.old.notes, *self.notes()),
        )

    def notes(self) -> Iterator[str]:
        """A note for each operator that reads rows of other slices, and one for random numbers."""
        nodes = {node.name: node for node in self.old.calls()}
        seen: dict[str, int] = {}
        for name, nbytes in self.placements.gathered_bytes.items():
            node = nodes[name]
            if node.meta["phase"] == "forward":
                where = f"{node.target} needs all rows of the batch ({source_line(node)})"
                seen[where] = seen.get(where, 0) + nbytes
        for where, nbytes in seen.items():
            yield f"{where}: {nbytes} bytes are gathered, exact"
        for name in sorted(self.placements.local_random)[:1]:
            line = source_line(nodes[name])
            yield NumericsNote(f"each rank draws random numbers for its own rows, first at {line}")
