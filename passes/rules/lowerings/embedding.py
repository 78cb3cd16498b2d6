"""Own lowerings of what looks entries up by number, the numbered dim being sharded.

A rank knows the entries of its chunk. What is asked of others it answers with zero: the results are
summands, or a rank's own part of a table. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value


def places(ctx: LoweringContext, numbers: fx.Node, entries: int) -> tuple[fx.Node, fx.Node]:
    """Where some of `entries` lie in this rank's chunk, 0 if they do not; and whether they do."""
    begin, width = ctx.chunk(entries)
    place = ctx.op(aten.sub.Scalar, numbers, begin)
    known = ctx.op(
        aten.logical_and.default,
        ctx.op(aten.ge.Scalar, place, 0),
        ctx.op(aten.lt.Scalar, place, width),
    )
    return ctx.op(aten.where.ScalarOther, known, place, 0), known


def zero_unless(ctx: LoweringContext, known: fx.Node, node: fx.Node, first: int = 0) -> fx.Node:
    """Zeros where an entry is not known; its dims begin at dim `first` of the node."""
    shape = [1] * first + list(value(known).shape)
    shape += [1] * (value(node).dim() - len(shape))
    return ctx.op(aten.where.ScalarOther, ctx.op(aten.view.default, known, shape), node, 0)


# -- embedding ---------------------------------------------------------------------------------


def _entries(operator: Operator) -> list[Loop]:
    """(weight, indices, ...): the entries."""
    part: Reduced = "sum"
    return [Loop(operator.operands[0].shape[0], (DimAccess(0), None), (part,), interleavable=False)]


def _embedding(ctx: LoweringContext) -> list[fx.Node]:
    weight, numbers = ctx.shards
    place, known = places(ctx, numbers, ctx.operator.operands[0].shape[0])
    return [zero_unless(ctx, known, ctx.op(aten.embedding.default, weight, place))]


def _entries_backward(operator: Operator) -> list[Loop]:
    """(gradient, indices, entries, padding, by frequency): the entries, of the result alone."""
    by_frequency = operator.args[4]
    loop = Loop(operator.args[2], (None, None), (DimAccess(0),), interleavable=False)
    return [] if by_frequency else [loop]


def _embedding_backward(ctx: LoweringContext) -> list[fx.Node]:
    """What is not this rank's goes into one more entry, which is left out."""
    gradient, numbers, entries, padding, by_frequency = ctx.arguments.args
    _, width = ctx.chunk(entries)
    place, known = places(ctx, numbers, entries)
    if padding >= 0:
        real = ctx.op(aten.ne.Scalar, numbers, padding)
        known = ctx.op(aten.logical_and.default, known, real)
    place = ctx.op(aten.where.ScalarOther, known, place, width)
    table = ctx.op(ctx.operator.target, gradient, place, width + 1, width, by_frequency)
    return [ctx.op(aten.slice.Tensor, table, 0, 0, width)]


# -- indexing ----------------------------------------------------------------------------------


def _indexed(operator: Operator) -> int | None:
    """The dim that `index` or `index_put` indexes, None unless it is one, by integers."""
    given = [(dim, i) for dim, i in enumerate(operator.args[1]) if i is not None]
    if len(given) != 1 or given[0][1].dtype == torch.bool:
        return None
    return given[0][0]


def _index_dim(operator: Operator) -> list[Loop]:
    dim = _indexed(operator)
    if dim is None:
        return []
    return [
        Loop(operator.operands[0].shape[dim], (DimAccess(dim), None), ("sum",), interleavable=False)
    ]


def _index(ctx: LoweringContext) -> list[fx.Node]:
    source, numbers = ctx.shards
    dim = ctx.shard.dim
    place, known = places(ctx, _positive(ctx, numbers, dim), _size(ctx, dim))
    found = ctx.op(aten.index.Tensor, source, [None] * dim + [place])
    return [zero_unless(ctx, known, found, dim)]


def _index_put_dim(operator: Operator) -> list[Loop]:
    dim = _indexed(operator)
    if dim is None or not operator.argument(3, "accumulate", False):
        return []
    values, numbers = operator.operands[2], operator.operands[1]
    if values.dim() != operator.operands[0].dim() - 1 + numbers.dim():
        return []  # they are broadcast
    return [
        Loop(
            operator.operands[0].shape[dim],
            (DimAccess(dim), None, None),
            (DimAccess(dim),),
            interleavable=False,
        )
    ]


def _index_put(ctx: LoweringContext) -> list[fx.Node]:
    target, numbers, values = ctx.shards
    dim = ctx.shard.dim
    place, known = places(ctx, _positive(ctx, numbers, dim), _size(ctx, dim))
    values = zero_unless(ctx, known, values, dim)
    return [ctx.op(aten.index_put.default, target, [None] * dim + [place], values, True)]


def _positive(ctx: LoweringContext, numbers: fx.Node, dim: int) -> fx.Node:
    """Numbers from the front: negative ones count from the end."""
    later = ctx.op(aten.add.Scalar, numbers, _size(ctx, dim))
    return ctx.op(aten.where.self, ctx.op(aten.lt.Scalar, numbers, 0), later, numbers)


def _size(ctx: LoweringContext, dim: int) -> int:
    """The entries that there are on all ranks together."""
    return ctx.operator.operands[0].shape[dim]


def _along_dim(operator: Operator) -> list[Loop]:
    """(source, dim, numbers): the dim of the source."""
    source = operator.operands[0]
    if not source.dim():
        return []
    dim = operator.args[1] % source.dim()
    return [Loop(source.shape[dim], (DimAccess(dim), None), ("sum",), interleavable=False)]


def _gather(ctx: LoweringContext) -> list[fx.Node]:
    source, numbers = ctx.shards
    dim = ctx.shard.dim
    place, known = places(ctx, numbers, _size(ctx, dim))
    found = ctx.op(ctx.operator.target, source, dim, place)
    first = dim if ctx.operator.target is aten.index_select.default else 0
    return [zero_unless(ctx, known, found, first)]


def _scatter_dim(operator: Operator) -> list[Loop]:
    """(target, dim, numbers, summands): the dim of the target."""
    return [
        replace(loop, operands=(loop.operands[0], None, None), results=(loop.operands[0],))
        for loop in _along_dim(operator)
    ]


def _scatter_add(ctx: LoweringContext) -> list[fx.Node]:
    target, numbers, summands = ctx.shards
    dim = ctx.shard.dim
    place, known = places(ctx, numbers, _size(ctx, dim))
    for each, size in enumerate(value(place).shape):
        summands = ctx.op(aten.slice.Tensor, summands, each, 0, size)
    summands = zero_unless(ctx, known, summands)
    return [ctx.op(aten.scatter_add.default, target, dim, place, summands)]


LOWERINGS: dict[str, Any] = {
    "embedding": ((aten.embedding.default,), _entries, _embedding),
    "embedding_backward": (
        (aten.embedding_dense_backward.default,),
        _entries_backward,
        _embedding_backward,
    ),
    "index": ((aten.index.Tensor,), _index_dim, _index),
    "index_put": ((aten.index_put.default,), _index_put_dim, _index_put),
    "gather": ((aten.gather.default, aten.index_select.default), _along_dim, _gather),
    "scatter_add": ((aten.scatter_add.default,), _scatter_dim, _scatter_add),
}
"""Targets, loops and lowering, by name."""
