"""`RedistributeEmitter`: redistributions as nodes of a graph.

Collectives work on dim 0, so another dim is moved there and back. An uneven dim needs no padding in
a gather or scatter; the chunks of an all-to-all are padded to equal size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autopar.core.ir.graph import tensors
from autopar.core.ir.placement import Partial, Shard, chunk_of
from autopar.errors import PassError
from autopar.passes.core.collective_ops import (
    collective,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from autopar.passes.core.node_builder import aten, call
from autopar.passes.rules.local_args import local_shape
from autopar.passes.rules.redistribute import RedistributeStep


class RedistributeEmitter:
    """Writes nodes at a graph's insertion point, for one rank of an axis, like those of a node."""

    def __init__(self, graph: fx.Graph, like: fx.Node, ranks: int, rank: int, axis: str) -> None:
        self.graph, self.like = graph, like
        self.ranks, self.rank, self.axis = ranks, rank, axis

    def emit(self, step: RedistributeStep, value: fx.Node, whole: Sequence[int]) -> fx.Node:
        """Writes one step of this rank's value, whose whole has the shape `whole`.

        Raises:
            PassError: the step cannot be written.
        """
        match step:
            case RedistributeStep("all_gather", Shard() as before):
                return self.all_gather(value, before, whole)
            case RedistributeStep("all_reduce", Partial(op)):
                options = (self.axis,) if op == "sum" else (self.axis, op)
                return collective(self.graph, self.like, start_all_reduce, [value], *options)[0]
            case RedistributeStep("reduce_scatter", _, Shard() as after):
                return self.reduce_scatter(value, after)
            case RedistributeStep("all_to_all", Shard() as before, Shard() as after):
                padded = step.padded(whole, self.ranks)
                if padded == list(whole):
                    return self.all_to_all(value, before, after)
                value = self.pad(value, local_shape(padded, before, self.ranks))
                moved_value, shape = self.all_to_all(value, before, after), self.local(whole, after)
                return self.cut(moved_value, {p.dim: shape[p.dim] for p in (before, after)})
            case RedistributeStep("slice", _, Shard() as after):
                return self.slice(value, after)
            case RedistributeStep("keep_first"):
                return self.keep_first(value)
            case _:
                raise PassError(f"{step} cannot be emitted: add a case to RedistributeEmitter.emit")

    def all_gather(self, value: fx.Node, shard: Shard, whole: Sequence[int]) -> fx.Node:
        """The whole of a sharded value."""
        shape, size = _shape(value), whole[shard.dim]
        # On dim 0 no copy is needed. Even chunks of other dims are stacked, and copied once, after
        # the message. Uneven chunks cannot be stacked: they are copied before and after it.
        if shard == Shard(0) or size % self.ranks:
            front = self.contiguous(self.moved(value, shard.dim, 0))
            return self.back(self.start(start_all_gather, front, [size]), shard.dim)
        one = self.view(self.contiguous(value), [1, *shape])
        every = self.start(start_all_gather, one, [self.ranks])
        return self.from_front(every, shape, shard)

    def reduce_scatter(self, value: fx.Node, shard: Shard) -> fx.Node:
        """This rank's shard of the sum of the ranks' values."""
        whole = _shape(value)
        shape = self.local(whole, shard)
        if shard == Shard(0) or whole[shard.dim] % self.ranks:
            front, rows = self.moved(value, shard.dim, 0), [shape[shard.dim]]
            return self.back(self.start(start_reduce_scatter, front, rows), shard.dim)
        chunks = self.contiguous(self.to_front(value, shard))
        return self.view(self.start(start_reduce_scatter, chunks, [1]), shape)

    def all_to_all(self, value: fx.Node, before: Shard, after: Shard) -> fx.Node:
        """This rank's shard of another dim, where both dims are even."""
        shape = self.local(_shape(value), after)
        chunks = self.contiguous(self.to_front(value, after))
        return self.from_front(self.start(start_all_to_all, chunks), shape, before)

    def slice(self, value: fx.Node, shard: Shard) -> fx.Node:
        """This rank's shard of a whole value."""
        whole = _shape(value)
        if shard.interleave == 1:
            begin, width = chunk_of(whole[shard.dim], self.ranks, self.rank)
            part = self.op(aten.slice.Tensor, value, shard.dim, begin, begin + width)
            return self.contiguous(part)
        part = self.op(aten.select.int, self.to_front(value, shard), 0, self.rank)
        return self.view(self.contiguous(part), self.local(whole, shard))

    def keep_first(self, value: fx.Node) -> fx.Node:
        """The value on rank 0, zeros on others; all ranks run the same operators."""
        device = tensors(value)[0].device
        others = self.op(aten.full.default, [], self.rank != 0, dtype=torch.bool, device=device)
        return self.op(aten.masked_fill.Scalar, value, others, 0)

    # Helpers.

    def local(self, whole: Sequence[int], shard: Shard) -> list[int]:
        """The shape of this rank's shard."""
        return local_shape(whole, shard, self.ranks, self.rank)

    def moved(self, value: fx.Node, source: int, target: int) -> fx.Node:
        """The value with a dim moved to another position."""
        if source == target:
            return value
        order = list(range(len(_shape(value))))
        order.insert(target, order.pop(source))
        return self.op(aten.permute.default, value, order)

    def back(self, value: fx.Node, dim: int) -> fx.Node:
        """A contiguous value with dim 0 moved to `dim`, copied on all ranks or on none."""
        moved = self.moved(value, 0, dim)
        # is_contiguous may differ between ranks with uneven shards. Ranks must write the same
        # nodes, or they make other buckets.
        return moved if math.prod(_shape(moved)[:dim]) == 1 else self.copied(moved)

    def pad(self, value: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The value padded with zeros at the end of each dim, up to a shape."""
        missing = [n - have for n, have in zip(shape, _shape(value), strict=True)]
        pads = [n for after in reversed(missing) for n in (0, after)]
        return self.op(aten.constant_pad_nd.default, self.contiguous(value), pads)

    def cut(self, value: fx.Node, sizes: Mapping[int, int]) -> fx.Node:
        """The first elements of some dims, copied on all ranks."""
        for dim, size in sizes.items():
            value = self.op(aten.slice.Tensor, value, dim, 0, size)
        return self.copied(value)

    def to_front(self, value: fx.Node, shard: Shard) -> fx.Node:
        """A dim of pieces, ranks and elements [k n m] as chunks [n, ..., k, m, ...] by rank."""
        shape, dim = _shape(value), shard.dim
        pieces = [shard.interleave, self.ranks, shape[dim] // (shard.interleave * self.ranks)]
        split = self.view(value, [*shape[:dim], *pieces, *shape[dim + 1 :]])
        count = len(shape) + 2
        order = [dim + 1, *(d for d in range(count) if d != dim + 1)]
        return self.op(aten.permute.default, split, order)

    def from_front(self, value: fx.Node, shape: Sequence[int], shard: Shard) -> fx.Node:
        """The whole value from chunks [n, ...] by rank, each a shard of `shape`."""
        dim, pieces = shard.dim, shard.interleave
        inner = [*shape[:dim], pieces, shape[dim] // pieces, *shape[dim + 1 :]]
        split = self.view(value, [self.ranks, *inner])
        order = [*range(1, dim + 2), 0, *range(dim + 2, len(inner) + 1)]
        moved = self.contiguous(self.op(aten.permute.default, split, order))
        return self.view(moved, [*shape[:dim], shape[dim] * self.ranks, *shape[dim + 1 :]])

    def start(self, target: Any, value: fx.Node, *options: Any) -> fx.Node:
        (result,) = collective(self.graph, self.like, target, [value], *options, self.axis)
        return result

    def op(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, self.like, target, *args, **kwargs)

    def contiguous(self, value: fx.Node) -> fx.Node:
        return value if tensors(value)[0].is_contiguous() else self.copied(value)

    def copied(self, value: fx.Node) -> fx.Node:
        return self.op(aten.clone.default, value, memory_format=torch.contiguous_format)

    def view(self, value: fx.Node, shape: Sequence[int]) -> fx.Node:
        """The value in another shape, copied if its strides do not allow a view."""
        if list(shape) == _shape(value):
            return value
        if not can_view(tensors(value)[0], shape):
            value = self.contiguous(value)
        return self.op(aten.view.default, value, list(shape))


def can_view(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether the strides of a tensor allow a view of another shape."""
    if tensor.is_contiguous() and math.prod(shape) == tensor.numel() and tensor.numel():
        return min(shape, default=0) >= 0
    try:
        tensor.view(list(shape))
    except (RuntimeError, ValueError):
        return False
    return True


def _shape(value: fx.Node) -> list[int]:
    return list(tensors(value)[0].shape)
