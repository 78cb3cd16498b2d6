"""Custom lowerings of embedding, indexing, gather and scatter along the sharded indexed dim.

A rank has the entries of its chunk and yields zeros for all others, so results are partial sums or
shards of a table. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.loops import Loop, Operator
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
    return [_indexed_loop(operator, 0)]


def _indexed_loop(operator: Operator, dim: int) -> Loop:
    """The loop over an indexed dim of the first operand, which leaves partial sums."""
    size = operator.operands[0].shape[dim]
    return Loop.over(size, (dim, None), ("sum",), interleavable=False)


def _embedding(ctx: LoweringContext) -> list[fx.Node]:
    weight, indices = ctx.shards
    local, known = local_indices(ctx, indices, ctx.operator.operands[0].shape[0])
    return [zero_unless(ctx, known, ctx.op(aten.embedding.default, weight, local))]


def _entries_backward(operator: Operator) -> list[Loop]:
    """(gradient, indices, entries, padding, by frequency): entries, of the result alone."""
    loop = Loop.over(operator.args[2], (None, None), (0,), interleavable=False)
    return [] if operator.args[4] else [loop]


def _embedding_backward(ctx: LoweringContext) -> list[fx.Node]:
    """Adds gradients of other ranks' entries to one more entry, which is dropped."""
    gradient, indices, entries, padding, by_frequency = ctx.arguments.args
    _, width = ctx.chunk(entries)
    local, known = local_indices(ctx, indices, entries)
    # `local` renumbers entries, so the kernel cannot tell the padding entry by its number.
    if padding >= 0:
        real = ctx.op(aten.ne.Scalar, indices, padding)
        known = ctx.op(aten.logical_and.default, known, real)
    local = ctx.op(aten.where.ScalarOther, known, local, width)
    table = ctx.op(ctx.operator.target, gradient, local, width + 1, width, by_frequency)
    return [ctx.op(aten.slice.Tensor, table, 0, 0, width)]


# -- indexing ----------------------------------------------------------------------------------


def _index_dim(operator: Operator) -> list[Loop]:
    """(source, indices, ...): the indexed dim, if one dim is indexed by integers."""
    indexed = [(dim, i) for dim, i in enumerate(operator.args[1]) if i is not None]
    if len(indexed) != 1 or indexed[0][1].dtype == torch.bool:
        return []
    return [_indexed_loop(operator, indexed[0][0])]


def _index(ctx: LoweringContext) -> list[fx.Node]:
    source, indices = ctx.shards
    dim = ctx.shard.dim
    local, known = _nonnegative_indices(ctx, indices)
    found = ctx.op(aten.index.Tensor, source, [None] * dim + [local])
    return [zero_unless(ctx, known, found, dim)]


def _index_put_dim(operator: Operator) -> list[Loop]:
    target, indices, values = operator.operands[0], operator.operands[1], operator.operands[-1]
    is_broadcast = values.dim() != target.dim() - 1 + indices.dim()
    if is_broadcast or not operator.argument("accumulate"):
        return []
    return _of_target(_index_dim(operator))


def _of_target(loops: list[Loop]) -> list[Loop]:
    """The loops of an operator that adds summands to the indexed entries, which it returns."""
    return [
        replace(loop, operands=(loop.operands[0], None, None), results=(loop.operands[0],))
        for loop in loops
    ]


def _index_put(ctx: LoweringContext) -> list[fx.Node]:
    target, indices, values = ctx.shards
    dim = ctx.shard.dim
    local, known = _nonnegative_indices(ctx, indices)
    values = zero_unless(ctx, known, values, dim)
    return [ctx.op(aten.index_put.default, target, [None] * dim + [local], values, True)]


def _nonnegative_indices(ctx: LoweringContext, indices: fx.Node) -> tuple[fx.Node, fx.Node]:
    """`local_indices` of indices of which negative ones count from the end."""
    size = ctx.operator.operands[0].shape[ctx.shard.dim]
    later = ctx.op(aten.add.Scalar, indices, size)
    indices = ctx.op(aten.where.self, ctx.op(aten.lt.Scalar, indices, 0), later, indices)
    return local_indices(ctx, indices, size)


def _along_dim(operator: Operator) -> list[Loop]:
    """(source, dim, indices): the dim of the source."""
    count = operator.operands[0].dim()
    return [_indexed_loop(operator, operator.args[1] % count)] if count else []


def _gather(ctx: LoweringContext) -> list[fx.Node]:
    source, indices = ctx.shards
    dim = ctx.shard.dim
    local, known = local_indices(ctx, indices, ctx.operator.operands[0].shape[dim])
    found = ctx.op(ctx.operator.target, source, dim, local)
    first = dim if ctx.operator.target is aten.index_select.default else 0
    return [zero_unless(ctx, known, found, first)]


def _scatter_dim(operator: Operator) -> list[Loop]:
    """(target, dim, indices, summands): the dim of the target."""
    return _of_target(_along_dim(operator))


def _scatter_add(ctx: LoweringContext) -> list[fx.Node]:
    target, indices, summands = ctx.shards
    dim = ctx.shard.dim
    local, known = local_indices(ctx, indices, ctx.operator.operands[0].shape[dim])
    # torch lets summands exceed their indices in any dim; `known` has the indices' shape.
    for each, size in enumerate(value(local).shape):
        summands = ctx.op(aten.slice.Tensor, summands, each, 0, size)
    summands = zero_unless(ctx, known, summands)
    return [ctx.op(aten.scatter_add.default, target, dim, local, summands)]


LOWERINGS: dict[str, Any] = {
    "embedding": ("embedding", _entries, _embedding),
    "embedding_backward": ("embedding_dense_backward", _entries_backward, _embedding_backward),
    "index": ("index.Tensor", _index_dim, _index),
    "index_put": ("index_put", _index_put_dim, _index_put),
    "gather": ("gather index_select", _along_dim, _gather),
    "scatter_add": ("scatter_add", _scatter_dim, _scatter_add),
}
