"""Redistribution along the batch axis: moves of a tensor from one placement to another.

| from | to | moves |
|---|---|---|
| R | S(d) | `select`: this slice's units, by `BatchIndex` |
| S(d) | R | `gather`: all-gather; over micro-batches `spread`, `reduce` |
| P | R | `reduce`: all-reduce, small tensors in float64 |
| P | S(d) | `scatter`: reduce-scatter; or `reduce`, `select` |
| R | P | `share`: times this slice's `BatchFraction`; integers stay on slice 0 |
| S(d) | P | `spread`: zeros around this slice's units |
| S(d) | S(e) | `exchange`: all-to-all; or `gather`, `select` |

The operators depend on the slice only through the shapes of uneven slices. The position of a slice
is the input `BatchIndex`, so ranks and micro-batches of equal shapes share one program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import torch
from torch import fx

from autopar.core.ir.batch_slicing import BATCH, BatchSlices
from autopar.core.ir.graph import tensors
from autopar.core.ir.placement import Partial, Placement, Replicate, Shard
from autopar.passes.core.collective_ops import collective, start_all_gather, start_all_reduce
from autopar.passes.core.node_builder import aten
from autopar.passes.rules.emit_redistribute import RedistributeEmitter
from autopar.passes.rules.redistribute import RedistributeStep

Kind = Literal["select", "gather", "reduce", "scatter", "share", "spread", "exchange"]


class Move(NamedTuple):
    """One step of a redistribution, of a kind in the table of this module."""

    kind: Kind
    before: Placement
    after: Placement


WIDE_BYTES = 1 << 16
"""Largest tensor, in float64 bytes, that is summed in float64, so that sums share a message."""

BYTES_PER_SENT_BYTE = 10.0
"""Cost of sending one byte, in bytes of memory traffic."""

LATENCY = float(1 << 17)
"""Latency of one collective, in bytes of memory traffic."""

MICRO_BATCH_FACTOR = 100.0
"""Cost factor of collectives over micro-batches, since schedules allow few of them."""


def moves(before: Placement, after: Placement, slices: BatchSlices) -> list[Move] | None:
    """The moves from one placement to another; empty if they are equal, None if impossible."""
    whole, partial = Replicate(), Partial()
    joint = slices.is_even and not slices.over_time
    match before, after:
        case _ if before == after:
            return []
        case Replicate(), Shard():
            return [Move("select", before, after)]
        case Replicate(), Partial("sum"):
            return [Move("share", before, after)]
        # Micro-batches run one after the other, so that only sums can cross them.
        case Shard(), Replicate() if slices.over_time:
            return [Move("spread", before, partial), Move("reduce", partial, after)]
        case Shard(), Replicate():
            return [Move("gather", before, after)]
        case Shard(), Partial("sum"):
            return [Move("spread", before, after)]
        case Partial(), Replicate():
            return [Move("reduce", before, after)]
        case Partial("sum"), Shard() if joint:
            return [Move("scatter", before, after)]
        case Partial(), Shard():
            return [Move("reduce", before, whole), Move("select", whole, after)]
        case Shard(dim), Shard(other) if dim != other and joint:
            return [Move("exchange", before, after)]
        case Shard(), Shard():
            first = moves(before, whole, slices)
            return None if first is None else [*first, Move("select", whole, after)]
        case _:
            return None


def move_cost(move: Move, tensor: torch.Tensor, slices: BatchSlices) -> float:
    """The cost of a move, in bytes of memory traffic, given the unsharded tensor."""
    whole = float(tensor.numel() * tensor.element_size())
    part = whole / slices.count
    factor = MICRO_BATCH_FACTOR if slices.over_time else 1.0
    sent = BYTES_PER_SENT_BYTE * (slices.count - 1) / slices.count * factor
    start = LATENCY * factor
    match move.kind:
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


class BatchRedistributor(RedistributeEmitter):
    """Writes moves at the insertion point of a slice's graph; callables return placeholders."""

    def __init__(
        self,
        graph: fx.Graph,
        like: fx.Node,
        slices: BatchSlices,
        batch_index: Callable[[], fx.Node],
        batch_fraction: Callable[[], fx.Node],
    ) -> None:
        super().__init__(graph, like, slices.axis_size, slices.index, BATCH)
        self.slices, self.batch_index, self.batch_fraction = slices, batch_index, batch_fraction

    def write(self, move: Move, value: fx.Node, whole: tuple[int, ...]) -> fx.Node:
        """Writes one move of a value of unsharded shape `whole`; returns the moved value."""
        match move:
            case "select", _, Shard() as after:
                return self._select(value, after)
            case "gather", Shard() as before, after if self.slices.is_even:
                return self.emit(RedistributeStep("all_gather", before, after), value, whole)
            case "gather", Shard() as before, _:
                return self._gather_uneven(value, before, whole)
            case "reduce", Partial() as before, _:
                return self.reduce([value], before.op)[0]
            case "scatter", before, Shard() as after:
                return self.emit(RedistributeStep("reduce_scatter", before, after), value, whole)
            case "exchange", before, after:
                return self.emit(RedistributeStep("all_to_all", before, after), value, whole)
            case "share", _, _:
                return self.share(value)
            case "spread", Shard() as before, _:
                return self._spread(value, before, whole)
        raise AssertionError(f"{move} is no move")

    def reduce(self, values: Iterable[fx.Node], op: str = "sum") -> list[fx.Node]:
        """Reduces values over all slices, with one collective for each dtype."""
        if op == "min":
            maxima = self.reduce(map(self._negated, values), "max")
            return [self._negated(maximum) for maximum in maxima]
        values = list(values)
        sent = [self._widened(value, op) for value in values]
        found: dict[int, fx.Node] = {}
        for dtype in dict.fromkeys(_fake(node).dtype for node in sent):
            places = [i for i, node in enumerate(sent) if _fake(node).dtype == dtype]
            options = () if op == "sum" else (op,)
            operands = [sent[i] for i in places]
            reduced = collective(self.graph, self.like, start_all_reduce, operands, BATCH, *options)
            found |= dict(zip(places, reduced, strict=True))
        return [self._cast(found[i], _fake(value).dtype) for i, value in enumerate(values)]

    def share(self, value: fx.Node) -> fx.Node:
        """This slice's summand of a replicated value."""
        dtype = _fake(value).dtype
        if dtype.is_floating_point or dtype.is_complex:
            return self.op(aten.mul.Tensor, value, self._cast(self.batch_fraction(), dtype))
        return self.keep_first(value)

    def keep_first(self, value: fx.Node) -> fx.Node:
        """The value on slice 0, zeros on all other slices."""
        place = self.op(aten.select.int, self.batch_index(), 0, 0)
        others = self.op(aten.ne.Scalar, place, 0)
        return self.op(aten.masked_fill.Scalar, value, others, 0)

    def _select(self, value: fx.Node, shard: Shard) -> fx.Node:
        shape = tuple(_fake(value).shape)
        split, dim = self.slices.split_shape(shape, shard)
        part = self.op(aten.index_select.default, self.view(value, split), dim, self.batch_index())
        return self.view(part, self.local(shape, shard))

    def _spread(self, value: fx.Node, shard: Shard, whole: tuple[int, ...]) -> fx.Node:
        split, dim = self.slices.split_shape(whole, shard)
        local = [*split[:dim], self.slices.local_units, *split[dim + 1 :]]
        zeros = self.op(aten.new_zeros.default, value, split)
        part = self.view(value, local)
        spread = self.op(aten.index_copy.default, zeros, dim, self.batch_index(), part)
        return self.view(spread, list(whole))

    def _gather_uneven(self, value: fx.Node, shard: Shard, whole: tuple[int, ...]) -> fx.Node:
        """Gathers slices padded to the rows of the largest, and drops the padding."""
        slices = self.slices
        sizes = slices.sizes
        most, full = max(sizes), slices.rows % slices.count
        split, dim = slices.split_shape(whole, shard)
        local = self.view(value, [*split[:dim], slices.local_units, *split[dim + 1 :]])
        order = [dim, *(d for d in range(len(split)) if d != dim)]
        front = self.contiguous(self.op(aten.permute.default, local, order))
        rest = list(_fake(front).shape[1:])
        pads = [0] * (2 * len(rest)) + [0, most - slices.local_units]
        front = self.op(aten.constant_pad_nd.default, front, pads)
        every = self.start(start_all_gather, front, [slices.count * most])
        table = self.view(every, [slices.count, most, *rest])
        if slices.held:
            rows = [self.op(aten.select.int, table, 0, part) for part in range(slices.count)]
            pairs = zip(rows, sizes, strict=True)
            parts = [self.op(aten.slice.Tensor, row, 0, 0, size) for row, size in pairs]
        else:
            first = self.op(aten.slice.Tensor, table, 0, 0, full)
            others = self.op(aten.slice.Tensor, table, 0, full, slices.count)
            others = self.op(aten.slice.Tensor, others, 1, 0, most - 1)
            parts = [
                self.view(first, [full * most, *rest]),
                self.view(others, [(slices.count - full) * (most - 1), *rest]),
            ]
        joined = self.op(aten.cat.default, parts)
        back = [*range(1, dim + 1), 0, *range(dim + 1, len(split))]
        return self.view(self.op(aten.permute.default, joined, back), list(whole))

    def _negated(self, value: fx.Node) -> fx.Node:
        is_bool = _fake(value).dtype == torch.bool
        return self.op(aten.logical_not.default if is_bool else aten.neg.default, value)

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


def _fake(node: fx.Node) -> torch.Tensor:
    (fake,) = tensors(node)
    return fake
