"""Redistribution along the batch axis: how a tensor gets from one placement to another.

| from | to | steps |
|---|---|---|
| R | S(d) | `select`: this slice's units, by `BatchIndex` |
| S(d) | R | `gather`: all-gather; over micro-batches `spread`, `reduce` |
| P | R | `reduce`: all-reduce, small ones in float64 |
| P | S(d) | `scatter`: reduce-scatter, or `reduce`, `select` |
| R | P | `share`: times this slice's share of the rows; integers are kept by the first slice |
| S(d) | P | `spread`: zeros around this slice's units |
| S(d) | S(e) | `exchange`: all-to-all, or `gather`, `select` |

Nothing that is written depends on the slice but the shapes of uneven ones: where a slice stands
comes in by `BatchIndex`, so ranks and micro-batches of equal shapes share one program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from autopar.ir.batch_slicing import BATCH, BatchSlices
from autopar.ir.graph import tensors
from autopar.ir.placement import Partial, Placement, Replicate, Shard, even_rows
from autopar.passes.core.collective_ops import collective, start_all_gather, start_all_reduce
from autopar.passes.core.node_builder import aten, call
from autopar.passes.rules.emit_redistribute import RedistributeEmitter
from autopar.passes.rules.local_args import local_shape
from autopar.passes.rules.redistribute import RedistributeStep

Kind = Literal["select", "gather", "reduce", "scatter", "share", "spread", "exchange"]
Move = tuple[Kind, Placement, Placement]

WIDE_BYTES = 1 << 16
"""Sums of up to so many bytes travel as float64, so that they share a message."""

BYTES_PER_SENT_BYTE = 10.0
"""Bytes of memory traffic that sending one byte costs."""

LATENCY = float(1 << 17)
"""Bytes of memory traffic that one collective costs, however small."""

MICRO_BATCH_FACTOR = 100.0
"""Factor on collectives over micro-batches, most of which cannot be scheduled."""


def moves(before: Placement, after: Placement, slices: BatchSlices) -> list[Move] | None:
    """The moves from one placement to another; none if they are equal, None if there is no way."""
    whole, part = Replicate(), Partial()
    joint = slices.is_even and not slices.over_time
    if before == after:
        return []
    match before, after:
        case Replicate(), Shard():
            return [("select", before, after)]
        case Replicate(), Partial("sum"):
            return [("share", before, after)]
        case Shard(), Replicate() if slices.over_time:
            return [("spread", before, part), ("reduce", part, after)]
        case Shard(), Replicate():
            return [("gather", before, after)]
        case Shard(), Partial("sum"):
            return [("spread", before, after)]
        case Partial(), Replicate():
            return [("reduce", before, after)]
        case Partial("sum"), Shard() if joint:
            return [("scatter", before, after)]
        case Partial(), Shard():
            return [("reduce", before, whole), ("select", whole, after)]
        case Shard(dim), Shard(other) if dim != other and joint:
            return [("exchange", before, after)]
        case Shard(), Shard():
            first = moves(before, whole, slices)
            return None if first is None else [*first, ("select", whole, after)]
        case _:
            return None


def move_cost(move: Move, tensor: torch.Tensor, slices: BatchSlices) -> float:
    """The cost of a move of a whole tensor, in bytes of memory traffic."""
    whole = float(tensor.numel() * tensor.element_size())
    part = whole / slices.count
    sent = (
        BYTES_PER_SENT_BYTE
        * (slices.count - 1)
        / slices.count
        * (MICRO_BATCH_FACTOR if slices.over_time else 1.0)
    )
    start = LATENCY * (MICRO_BATCH_FACTOR if slices.over_time else 1.0)
    match move[0]:
        case "select":
            return 2 * part
        case "share" | "spread":
            return 2 * whole
        case "reduce":
            return start + 2 * sent * whole
        case "exchange":
            return start + sent * part
        case _:
            return start + sent * whole


@dataclass(frozen=True)
class BatchRedistributor:
    """Writes moves at a graph's insertion point.

    Attributes:
        graph: of one slice.
        like: node whose phase, block, stage and source new nodes take.
        slices: of the batch.
        index: gives the `BatchIndex` placeholder.
        weight: gives the `RowWeight` placeholder.
    """

    graph: fx.Graph
    like: fx.Node
    slices: BatchSlices
    index: Callable[[], fx.Node]
    weight: Callable[[], fx.Node]

    def write(self, move: Move, value: fx.Node, whole: tuple[int, ...]) -> fx.Node:
        """Writes one move of a value whose whole shape is given; returns the moved value."""
        match move:
            case "select", _, Shard() as after:
                return self._select(value, after)
            case "gather", Shard() as before, _:
                gather = self._gather_even if self.slices.is_even else self._gather_uneven
                return gather(value, before, whole)
            case "reduce", Partial() as before, _:
                return self.reduce([value], before.op)[0]
            case "scatter", before, Shard() as after:
                return self._emission().emit(
                    RedistributeStep("reduce_scatter", before, after), value, whole
                )
            case "exchange", before, after:
                return self._emission().emit(
                    RedistributeStep("all_to_all", before, after), value, whole
                )
            case "share", _, _:
                return self.share(value)
            case "spread", Shard() as before, _:
                return self._spread(value, before, whole)
        raise AssertionError(f"there is no move {move}")

    def reduce(self, values: Iterable[fx.Node], op: str = "sum") -> list[fx.Node]:
        """Reduces values over all slices in one message for each dtype that travels."""
        if op == "min":
            return [self._turned(made) for made in self.reduce(map(self._turned, values), "max")]
        values = list(values)
        sent = [self._widened(value, op) for value in values]
        found: dict[int, fx.Node] = {}
        for dtype in dict.fromkeys(_fake(node).dtype for node in sent):
            places = [i for i, node in enumerate(sent) if _fake(node).dtype == dtype]
            options = () if op == "sum" else (op,)
            operands = [sent[i] for i in places]
            made = collective(self.graph, self.like, start_all_reduce, operands, BATCH, *options)
            found |= dict(zip(places, made, strict=True))
        return [self._cast(found[i], _fake(value).dtype) for i, value in enumerate(values)]

    def share(self, value: fx.Node) -> fx.Node:
        """A summand of a value that every slice holds whole."""
        dtype = _fake(value).dtype
        if dtype.is_floating_point or dtype.is_complex:
            return self.op(aten.mul.Tensor, value, self._cast(self.weight(), dtype))
        return self.keep_first(value)

    def keep_first(self, value: fx.Node) -> fx.Node:
        """The value on the first slice, zeros on all others."""
        place = self.op(aten.select.int, self.index(), 0, 0)
        others = self.op(aten.ne.Scalar, place, 0)
        return self.op(aten.masked_fill.Scalar, value, others, 0)

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Writes an operator."""
        return call(self.graph, self.like, target, *args, **kwargs)

    def _emission(self) -> RedistributeEmitter:
        return RedistributeEmitter(
            self.graph, self.like, self.slices.count, self.slices.index, BATCH
        )

    def _select(self, value: fx.Node, shard: Shard) -> fx.Node:
        shape = tuple(_fake(value).shape)
        split, dim = self.slices.split_shape(shape, shard)
        part = self.op(aten.index_select.default, self._view(value, split), dim, self.index())
        return self._view(part, self._local(shape, shard))

    def _spread(self, value: fx.Node, shard: Shard, whole: tuple[int, ...]) -> fx.Node:
        split, dim = self.slices.split_shape(whole, shard)
        local = [*split[:dim], self.slices.local_units, *split[dim + 1 :]]
        zeros = self.op(aten.new_zeros.default, value, split)
        part = self._view(value, local)
        made = self.op(aten.index_copy.default, zeros, dim, self.index(), part)
        return self._view(made, list(whole))

    def _gather_even(self, value: fx.Node, shard: Shard, whole: tuple[int, ...]) -> fx.Node:
        return self._emission().emit(
            RedistributeStep("all_gather", shard, Replicate()), value, whole
        )

    def _gather_uneven(self, value: fx.Node, shard: Shard, whole: tuple[int, ...]) -> fx.Node:
        """Slices travel at the rows of the largest; the rows that others lack are cut away."""
        slices = self.slices
        sizes = even_rows(slices.rows, slices.count)
        most, full = sizes[0], slices.rows % slices.count
        split, dim = slices.split_shape(whole, shard)
        local = self._view(value, [*split[:dim], slices.local_units, *split[dim + 1 :]])
        order = [dim, *(d for d in range(len(split)) if d != dim)]
        front = self._contiguous(self.op(aten.permute.default, local, order))
        rest = list(_fake(front).shape[1:])
        pads = [0] * (2 * len(rest)) + [0, most - slices.local_units]
        front = self.op(aten.constant_pad_nd.default, front, pads)
        (every,) = collective(
            self.graph, self.like, start_all_gather, [front], [slices.count * most], BATCH
        )
        table = self._view(every, [slices.count, most, *rest])
        first = self.op(aten.slice.Tensor, table, 0, 0, full)
        others = self.op(aten.slice.Tensor, table, 0, full, slices.count)
        others = self.op(aten.slice.Tensor, others, 1, 0, most - 1)
        parts = [
            self._view(first, [full * most, *rest]),
            self._view(others, [(slices.count - full) * (most - 1), *rest]),
        ]
        joined = self.op(aten.cat.default, parts)
        back = [*range(1, dim + 1), 0, *range(dim + 1, len(split))]
        return self._view(self.op(aten.permute.default, joined, back), list(whole))

    def _turned(self, value: fx.Node) -> fx.Node:
        """The value in the opposite order: what was least is greatest."""
        is_truth = _fake(value).dtype == torch.bool
        return self.op(aten.logical_not.default if is_truth else aten.neg.default, value)

    def _widened(self, value: fx.Node, op: str) -> fx.Node:
        fake = _fake(value)
        if fake.dtype == torch.bool:
            return self._cast(value, torch.uint8)
        small = fake.numel() * 8 <= WIDE_BYTES
        return self._cast(value, torch.float64) if small and fake.is_floating_point() else value

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        if _fake(value).dtype == dtype:
            return value
        return self.op(aten._to_copy.default, value, dtype=dtype)

    def _local(self, shape: Sequence[int], shard: Shard) -> list[int]:
        return local_shape(shape, shard, self.slices.axis_size, self.slices.index)

    def _contiguous(self, value: fx.Node) -> fx.Node:
        return self._emission().contiguous(value)

    def _view(self, value: fx.Node, shape: Sequence[int]) -> fx.Node:
        return self._emission().view(value, shape)


def _fake(node: fx.Node) -> torch.Tensor:
    (fake,) = tensors(node)
    return fake
