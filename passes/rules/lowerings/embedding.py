"""Custom lowerings of embedding, indexing, gather and scatter along the sharded indexed dim.

A rank has the entries of its chunk and yields zeros for all others, so results are partial sums or
shards of a table. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value


def local_indices(ctx: LoweringContext, indices: fx.Node, entries: int) -> tuple[fx.Node, fx.Node]:
    """Indices into this rank's chunk of `entries`, 0 outside of it, and whether they are inside."""
    begin, width = ctx.chunk(entries)
    local = ctx.op(aten.sub.Scalar, indices, begin)
    known = ctx.op(
        aten.logical_and.default,
        ctx.op(aten.ge.Scalar, local, 0),
        ctx.op(aten.lt.Scalar, local, width),
    )
    return ctx.op(aten.where.ScalarOther, known, local, 0), known


def zero_unless(ctx: LoweringContext, known: fx.Node, node: fx.Node, first: int = 0) -> fx.Node:
    """The node with zeros where `known` is false; dim 0 of `known` is dim `first` of the node."""
    shape = [1] * first + list(value(known).shape)
    shape += [1] * (value(node).dim() - len(shape))
    return ctx.op(aten.where.ScalarOther, ctx.op(aten.view.default, known, shape), node, 0)


# -- embedding ---------------------------------------------------------------------------------


def _entries(operator: Operator) -> list[Loop]:
    """(weight, indices, ...): entries."""
    part: Reduced = "sum"
    return [Loop(operator.operands[0].shape[0], (DimAccess(0), None), (part,), interleavable=False)]


def _embedding(ctx: LoweringContext) -> list[fx.Node]:
    weight, indices = ctx.shards
    local, known = local_indices(ctx, indices, ctx.operator.operands[0].shape[0])
    return [zero_unless(ctx, known, ctx.op(aten.embedding.default, weight, local))]


def _entries_backward(operator: Operator) -> list[Loop]:
    """(gradient, indices, entries, padding, by frequency): entries, of the result alone."""
    by_frequency = operator.args[4]
    loop = Loop.over(operator.args[2], (None, None), (0,), interleavable=False)
    return [] if by_frequency else [loop]


def _embedding_backward(ctx: LoweringContext) -> list[fx.Node]:
    """Adds gradients of other ranks' entries to one more entry, which is dropped."""
    gradient, indices, entries, padding, by_frequency = ctx.arguments.args
    _, width = ctx.chunk(entries)
    local, known = local_indices(ctx, indices, entries)
    if padding >= 0:
        real = ctx.op(aten.ne.Scalar, indices, padding)
        known = ctx.op(aten.logical_and.default, known, real)
    local = ctx.op(aten.where.ScalarOther, known, local, width)
    table = ctx.op(ctx.operator.target, gradient, local, width + 1, width, by_frequency)
    return [ctx.op(aten.slice.Tensor, table, 0, 0, width)]


# -- indexing ----------------------------------------------------------------------------------


def _indexed(operator: Operator) -> int | None:
    """The dim of `index` or `index_put`, None unless one dim is indexed by integers."""
    indexed = [(dim, i) for dim, i in enumerate(operator.args[1]) if i is not None]
    if len(indexed) != 1 or indexed[0][1].dtype == torch.bool:
        return None
    return indexed[0][0]


def _index_dim(operator: Operator) -> list[Loop]:
    dim = _indexed(operator)
    if dim is None:
        return []
    return [Loop.over(operator.operands[0].shape[dim], (dim, None), ("sum",), interleavable=False)]


def _index(ctx: LoweringContext) -> list[fx.Node]:
    source, indices = ctx.shards
    dim = ctx.shard.dim
    local, known = local_indices(ctx, _nonnegative(ctx, indices, dim), _entries_of(ctx, dim))
    found = ctx.op(aten.index.Tensor, source, [None] * dim + [local])
    return [zero_unless(ctx, known, found, dim)]


def _index_put_dim(operator: Operator) -> list[Loop]:
    dim = _indexed(operator)
    if dim is None or not operator.argument(3, "accumulate", False):
        return []
    values, indices = operator.operands[2], operator.operands[1]
    if values.dim() != operator.operands[0].dim() - 1 + indices.dim():
        return []  # values are broadcast
    return [
        Loop.over(
            operator.operands[0].shape[dim],
            (dim, None, None),
            (dim,),
            interleavable=False,
        )
    ]


def _index_put(ctx: LoweringContext) -> list[fx.Node]:
    target, indices, values = ctx.shards
    dim = ctx.shard.dim
    local, known = local_indices(ctx, _nonnegative(ctx, indices, dim), _entries_of(ctx, dim))
    values = zero_unless(ctx, known, values, dim)
    return [ctx.op(aten.index_put.default, target, [None] * dim + [local], values, True)]


def _nonnegative(ctx: LoweringContext, indices: fx.Node, dim: int) -> fx.Node:
    """Indices without negative ones, which count from the end."""
    later = ctx.op(aten.add.Scalar, indices, _entries_of(ctx, dim))
    return ctx.op(aten.where.self, ctx.op(aten.lt.Scalar, indices, 0), later, indices)


def _entries_of(ctx: LoweringContext, dim: int) -> int:
    """Whole size of the indexed dim."""
    return ctx.operator.operands[0].shape[dim]


def _along_dim(operator: Operator) -> list[Loop]:
    """(source, dim, indices): the dim of the source."""
    source = operator.operands[0]
    if not source.dim():
        return []
    dim = operator.args[1] % source.dim()
    return [Loop(source.shape[dim], (DimAccess(dim), None), ("sum",), interleavable=False)]


def _gather(ctx: LoweringContext) -> list[fx.Node]:
    source, indices = ctx.shards
    dim = ctx.shard.dim
    local, known = local_indices(ctx, indices, _entries_of(ctx, dim))
    found = ctx.op(ctx.operator.target, source, dim, local)
    first = dim if ctx.operator.target is aten.index_select.default else 0
    return [zero_unless(ctx, known, found, first)]


def _scatter_dim(operator: Operator) -> list[Loop]:
    """(target, dim, indices, summands): the dim of the target."""
    return [
        replace(loop, operands=(loop.operands[0], None, None), results=(loop.operands[0],))
        for loop in _along_dim(operator)
    ]


def _scatter_add(ctx: LoweringContext) -> list[fx.Node]:
    target, indices, summands = ctx.shards
    dim = ctx.shard.dim
    local, known = local_indices(ctx, indices, _entries_of(ctx, dim))
    for each, size in enumerate(value(local).shape):
        summands = ctx.op(aten.slice.Tensor, summands, each, 0, size)
    summands = zero_unless(ctx, known, summands)
    return [ctx.op(aten.scatter_add.default, target, dim, local, summands)]


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
