"""Custom lowerings of cumulative sums and extrema along a sharded dim.

Ranks exchange the total or extremum of their shard, one number for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

from torch import fx

from autopar.passes.rules.loops import Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.operators.generic import over_dims, own_dim

# -- cumulative sums ---------------------------------------------------------------------------


def _cumsum(ctx: LoweringContext) -> list[fx.Node]:
    """Sums of the shard, plus the totals of the ranks before it."""
    dim, dtype = ctx.shard.dim, ctx.operator.results[0].dtype
    local = ctx.op(aten.cumsum.default, ctx.shards[0], dim, dtype=dtype)
    width = value(local).shape[dim]
    totals = ctx.gather_stacked(ctx.op(aten.slice.Tensor, local, dim, width - 1, width))
    later = [0, 0] * (value(totals).dim() - 1) + [1, -1]
    before = ctx.op(aten.constant_pad_nd.default, totals, later)
    # Every rank sums all totals and selects one: programs of ranks must be alike, so that
    # another axis can divide them.
    sums = ctx.op(aten.cumsum.default, before, 0, dtype=dtype)
    return [ctx.op(aten.add.Tensor, local, ctx.op(aten.select.int, sums, 0, ctx.rank))]


# -- extrema -----------------------------------------------------------------------------------


def _reduced(operator: Operator) -> list[Loop]:
    """(source, dims): each reduced dim, if the dtype is signed; results are whole."""
    # Minima are computed as maxima of negated values, and unsigned dtypes cannot be negated.
    is_signed = operator.operands[0].dtype.is_signed
    return over_dims(None, interleavable=False)(operator) if is_signed else []


def _least(ctx: LoweringContext) -> list[fx.Node]:
    args = ctx.arguments
    local = ctx.op(args.target, *args.args, **args.kwargs)
    (least,) = ctx.all_reduce(ctx.op(aten.neg.default, local), op="max")
    return [ctx.op(aten.neg.default, least)]


def _extremum(
    largest: bool, takes_dim: Callable[..., Any]
) -> Callable[[LoweringContext], list[fx.Node]]:
    """The extreme value over a dim, and its first index."""

    def lower(ctx: LoweringContext) -> list[fx.Node]:
        source, dim = ctx.shards[0], ctx.shard.dim
        size = ctx.operator.operands[0].shape[dim]
        begin, _ = ctx.chunk(size)
        pair = ctx.op(takes_dim, source, dim, True)
        local, place = (ctx.op(getitem, pair, i) for i in (0, 1))
        high = local if largest else ctx.op(aten.neg.default, local)
        (top,) = ctx.all_reduce(high, op="max")
        place = ctx.op(aten.add.Scalar, place, begin)
        beaten = ctx.op(aten.lt.Tensor, high, top)
        place = ctx.op(aten.where.ScalarSelf, beaten, size, place)
        (first,) = ctx.all_reduce(ctx.op(aten.neg.default, place), op="max")
        best = top if largest else ctx.op(aten.neg.default, top)
        found = [best, ctx.op(aten.neg.default, first)][-len(ctx.operator.results) :]
        return [
            ctx.op(aten.view.default, node, list(result.shape))
            for node, result in zip(found, ctx.operator.results, strict=True)
        ]

    return lower


def _one_dim(operator: Operator) -> list[Loop]:
    """As `_reduced` if a dim is given; without one, indices are over all dims."""
    return [] if operator.argument("dim") is None else _reduced(operator)


LOWERINGS: dict[str, Any] = {
    "cumsum": ("cumsum", own_dim(interleavable=False), _cumsum),
    "least": ("amin min", _reduced, _least),
    "argmax": ("argmax max.dim", _one_dim, _extremum(True, aten.max.dim)),
    "argmin": ("argmin min.dim", _one_dim, _extremum(False, aten.min.dim)),
}
