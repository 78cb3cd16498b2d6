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


def places(site: LoweringContext, numbers: fx.Node, entries: int) -> tuple[fx.Node, fx.Node]:
    """Where some of `entries` lie in this rank's chunk, 0 if they do not; and whether they do."""
    begin, width = site.chunk(entries)
    place = site.op(aten.sub.Scalar, numbers, begin)
    known = site.op(
        aten.logical_and.default,
        site.op(aten.ge.Scalar, place, 0),
        site.op(aten.lt.Scalar, place, width),
    )
    return site.op(aten.where.ScalarOther, known, place, 0), known


def zero_unless(site: LoweringContext, known: fx.Node, node: fx.Node, first: int = 0) -> fx.Node:
    """Zeros where an entry is not known; its dims begin at dim `first` of the node."""
    shape = [1] * first + list(value(known).shape)
    shape += [1] * (value(node).dim() - len(shape))
    return site.op(aten.where.ScalarOther, site.op(aten.view.default, known, shape), node, 0)


# -- embedding ---------------------------------------------------------------------------------


def _entries(operator: Operator) -> list[Loop]:
    """(weight, indices, ...): the entries."""
    part: Reduced = "sum"
    return [Loop(operator.operands[0].shape[0], (DimAccess(0), None), (part,), interleavable=False)]


def _embedding(site: LoweringContext) -> list[fx.Node]:
    weight, numbers = site.shards
    place, known = places(site, numbers, site.operator.operands[0].shape[0])
    return [zero_unless(site, known, site.op(aten.embedding.default, weight, place))]


def _entries_backward(operator: Operator) -> list[Loop]:
    """(gradient, indices, entries, padding, by frequency): the entries, of the result alone."""
    by_frequency = operator.args[4]
    loop = Loop(operator.args[2], (None, None), (DimAccess(0),), interleavable=False)
    return [] if by_frequency else [loop]


def _embedding_backward(site: LoweringContext) -> list[fx.Node]:
    """What is not this rank's goes into one more entry, which is left out."""
    gradient, numbers, entries, padding, by_frequency = site.arguments.args
    _, width = site.chunk(entries)
    place, known = places(site, numbers, entries)
    if padding >= 0:
        real = site.op(aten.ne.Scalar, numbers, padding)
        known = site.op(aten.logical_and.default, known, real)
    place = site.op(aten.where.ScalarOther, known, place, width)
    table = site.op(site.operator.target, gradient, place, width + 1, width, by_frequency)
    return [site.op(aten.slice.Tensor, table, 0, 0, width)]


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


def _index(site: LoweringContext) -> list[fx.Node]:
    source, numbers = site.shards
    dim = site.shard.dim
    place, known = places(site, _positive(site, numbers, dim), _size(site, dim))
    found = site.op(aten.index.Tensor, source, [None] * dim + [place])
    return [zero_unless(site, known, found, dim)]


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


def _index_put(site: LoweringContext) -> list[fx.Node]:
    target, numbers, values = site.shards
    dim = site.shard.dim
    place, known = places(site, _positive(site, numbers, dim), _size(site, dim))
    values = zero_unless(site, known, values, dim)
    return [site.op(aten.index_put.default, target, [None] * dim + [place], values, True)]


def _positive(site: LoweringContext, numbers: fx.Node, dim: int) -> fx.Node:
    """Numbers from the front: negative ones count from the end."""
    later = site.op(aten.add.Scalar, numbers, _size(site, dim))
    return site.op(aten.where.self, site.op(aten.lt.Scalar, numbers, 0), later, numbers)


def _size(site: LoweringContext, dim: int) -> int:
    """The entries that there are on all ranks together."""
    return site.operator.operands[0].shape[dim]


def _along_dim(operator: Operator) -> list[Loop]:
    """(source, dim, numbers): the dim of the source."""
    source = operator.operands[0]
    if not source.dim():
        return []
    dim = operator.args[1] % source.dim()
    return [Loop(source.shape[dim], (DimAccess(dim), None), ("sum",), interleavable=False)]


def _gather(site: LoweringContext) -> list[fx.Node]:
    source, numbers = site.shards
    dim = site.shard.dim
    place, known = places(site, numbers, _size(site, dim))
    found = site.op(site.operator.target, source, dim, place)
    first = dim if site.operator.target is aten.index_select.default else 0
    return [zero_unless(site, known, found, first)]


def _scatter_dim(operator: Operator) -> list[Loop]:
    """(target, dim, numbers, summands): the dim of the target."""
    return [
        replace(loop, operands=(loop.operands[0], None, None), results=(loop.operands[0],))
        for loop in _along_dim(operator)
    ]


def _scatter_add(site: LoweringContext) -> list[fx.Node]:
    target, numbers, summands = site.shards
    dim = site.shard.dim
    place, known = places(site, numbers, _size(site, dim))
    for each, size in enumerate(value(place).shape):
        summands = site.op(aten.slice.Tensor, summands, each, 0, size)
    summands = zero_unless(site, known, summands)
    return [site.op(aten.scatter_add.default, target, dim, place, summands)]


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
