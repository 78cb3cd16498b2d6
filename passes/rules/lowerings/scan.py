"""Own lowerings of cumulative sums and extrema, the dim that they run over being sharded.

What is sent are totals or extrema of a rank's part, one number for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

from torch import fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.operators.generic import reduced_dims

# -- cumulative sums ---------------------------------------------------------------------------


def _scanned(operator: Operator) -> list[Loop]:
    """(source, dim): the dim, in order."""
    source = operator.operands[0]
    return [
        Loop(source.shape[dim], (DimAccess(dim),), (DimAccess(dim),), interleavable=False)
        for dim in reduced_dims(operator, 1)
    ]


def _cumsum(site: LoweringContext) -> list[fx.Node]:
    """A rank's own sums, and the totals of the ranks before it."""
    dim, dtype = site.shard.dim, site.operator.results[0].dtype
    own = site.op(aten.cumsum.default, site.shards[0], dim, dtype=dtype)
    width = value(own).shape[dim]
    totals = site.gather_stacked(site.op(aten.slice.Tensor, own, dim, width - 1, width))
    later = [0, 0] * (value(totals).dim() - 1) + [1, -1]
    before = site.op(aten.constant_pad_nd.default, totals, later)
    sums = site.op(aten.cumsum.default, before, 0, dtype=dtype)
    return [site.op(aten.add.Tensor, own, site.op(aten.select.int, sums, 0, site.rank))]


# -- extrema -----------------------------------------------------------------------------------


def _reduced(operator: Operator) -> list[Loop]:
    """(source, dims): each dim that is reduced; of what has a sign. Results are whole."""
    source = operator.operands[0]
    results = (None,) * len(operator.results)
    dims = reduced_dims(operator, 1) if source.dtype.is_signed else []
    return [
        Loop(source.shape[dim], (DimAccess(dim),), results, interleavable=False) for dim in dims
    ]


def _least(site: LoweringContext) -> list[fx.Node]:
    args = site.arguments
    own = site.op(args.target, *args.args, **args.kwargs)
    (least,) = site.all_reduce(site.op(aten.neg.default, own), op="max")
    return [site.op(aten.neg.default, least)]


def _extremum(
    largest: bool, takes_dim: Callable[..., Any]
) -> Callable[[LoweringContext], list[fx.Node]]:
    """The extreme value over a dim, and the first place where it stands."""

    def lower(site: LoweringContext) -> list[fx.Node]:
        source, dim = site.shards[0], site.shard.dim
        size = site.operator.operands[0].shape[dim]
        begin, _ = site.chunk(size)
        pair = site.op(takes_dim, source, dim, True)
        own, place = (site.op(getitem, pair, i) for i in (0, 1))
        high = own if largest else site.op(aten.neg.default, own)
        (top,) = site.all_reduce(high, op="max")
        place = site.op(aten.add.Scalar, place, begin)
        beaten = site.op(aten.lt.Tensor, high, top)
        place = site.op(aten.where.ScalarSelf, beaten, size, place)
        (first,) = site.all_reduce(site.op(aten.neg.default, place), op="max")
        best = top if largest else site.op(aten.neg.default, top)
        found = [best, site.op(aten.neg.default, first)][-len(site.operator.results) :]
        return [
            site.op(aten.view.default, node, list(result.shape))
            for node, result in zip(found, site.operator.results, strict=True)
        ]

    return lower


def _one_dim(operator: Operator) -> list[Loop]:
    """As `_reduced`, where a dim is given: without one places are counted through all dims."""
    return [] if operator.argument(1, "dim") is None else _reduced(operator)


LOWERINGS: dict[str, Any] = {
    "cumsum": ((aten.cumsum.default,), _scanned, _cumsum),
    "least": ((aten.amin.default, aten.min.default), _reduced, _least),
    "argmax": (
        (aten.argmax.default, aten.max.dim),
        _one_dim,
        _extremum(True, aten.max.dim),
    ),
    "argmin": (
        (aten.argmin.default, aten.min.dim),
        _one_dim,
        _extremum(False, aten.min.dim),
    ),
}
"""Targets, loops and lowering, by name."""
