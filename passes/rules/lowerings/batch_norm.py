"""Custom lowerings of batch norm with its rows sharded: statistics are those of all rows."""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch import fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value

FUNCTIONAL = aten._native_batch_norm_legit_functional.default
WITHOUT_BUFFERS = aten._native_batch_norm_legit.no_stats
BACKWARD = aten.native_batch_norm_backward.default


def _over(operator: Operator, count: int, results: tuple[Any, ...]) -> list[Loop]:
    """Every dim but that of channels: the first `count` operands run over it where they can."""
    source = operator.operands[0]
    dims = [dim for dim in range(source.dim()) if dim != 1]
    rest = (None,) * (len(operator.operands) - count)
    return [
        Loop(source.shape[dim], (DimAccess(dim),) * count + rest, (DimAccess(dim), *results))
        for dim in dims
    ]


def _rows(operator: Operator) -> list[Loop]:
    """(input, weight, bias, [mean, variance,] training, ...): rows, in training."""
    trains = operator.target is WITHOUT_BUFFERS or bool(operator.args[5])
    return _over(operator, 1, (None,) * (len(operator.results) - 1)) if trains else []


def _batch_norm(site: LoweringContext) -> list[fx.Node]:
    """Means and variances of all ranks are gathered and combined.

    Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979.
    """
    x, weight, bias, *rest = site.arguments.args
    stats = rest[:2] if site.operator.target is FUNCTIONAL else []
    momentum, eps = site.arguments.args[-2:]
    whole, own = site.operator.operands[0], value(x)
    channels, dims = whole.shape[1], [0, *range(2, whole.dim())]
    elements = whole.numel() // channels
    moments = site.op(aten.var_mean.correction, site.upcast(x), dims, correction=0)
    variance, mean = (site.op(getitem, moments, place) for place in (0, 1))
    share = site.op(aten.full_like.default, _first(site, mean), own.numel() / whole.numel())
    table = site.gather_stacked(site.op(aten.cat.default, [mean, variance, share]))
    sizes = [channels, channels, 1]
    pieces = site.op(aten.split_with_sizes.default, table, sizes, 1)
    means, variances, shares = (site.op(getitem, pieces, place) for place in range(3))

    def averaged(node: fx.Node) -> fx.Node:
        return site.op(aten.sum.dim_IntList, site.op(aten.mul.Tensor, node, shares), [0])

    mean = averaged(means)
    off = site.op(aten.sub.Tensor, means, mean)
    square = site.op(aten.mul.Tensor, off, off)
    variance = averaged(site.op(aten.add.Tensor, variances, square))
    inverse = site.op(aten.rsqrt.default, site.op(aten.add.Scalar, variance, eps))
    normed = site.op(
        aten._native_batch_norm_legit_no_training.default,
        x, weight, bias, mean, variance, momentum, eps,
    )  # fmt: skip
    results = [site.op(getitem, normed, 0), mean, inverse]
    if stats:
        fair = site.op(aten.mul.Scalar, variance, elements / max(elements - 1, 1))
        results += [
            _running(site, old, new, momentum) for old, new in zip(stats, (mean, fair), strict=True)
        ]
    return [
        site.cast(node, fake.dtype)
        for node, fake in zip(results, site.operator.results, strict=True)
    ]


def _first(site: LoweringContext, node: fx.Node) -> fx.Node:
    """The first element of a vector, as a vector."""
    return site.op(aten.slice.Tensor, node, 0, 0, 1)


def _running(site: LoweringContext, old: fx.Node, new: fx.Node, momentum: float) -> fx.Node:
    kept = site.op(aten.mul.Scalar, old, 1.0 - momentum)
    added = site.cast(site.op(aten.mul.Scalar, new, momentum), value(old).dtype)
    return site.op(aten.add.Tensor, kept, added)


def _rows_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, weight, means, variances, mean, rstd, training, eps, mask): rows.

    A sum over rows for weight and bias, each of which every rank has a part of.
    """
    return _over(operator, 2, ("sum", "sum")) if operator.args[7] else []


def _batch_norm_backward(site: LoweringContext) -> list[fx.Node | None]:
    """The backward given the statistics of all rows, less what flows through these.

    dx = w / s (dy - mean(dy) - xhat mean(dy xhat)), with s the deviation, means over all rows and
    xhat the normalised input. Source: Ioffe, Szegedy, Batch Normalization, 2015, section 3.
    """
    dy, x, weight, _, _, mean, inverse, _, eps, mask = site.arguments.args
    whole = site.operator.operands[1]
    shape = [1, -1] + [1] * (whole.dim() - 2)
    frozen = site.op(
        BACKWARD, dy, x, weight, mean, _variance(site, inverse, eps), mean, inverse, False, eps,
        [True, True, True],
    )  # fmt: skip
    direct, d_weight, d_bias = (site.op(getitem, frozen, place) for place in range(3))
    sum_xhat, sum_dy = site.all_reduce(d_weight, d_bias)
    scale = inverse if weight is None else site.op(aten.mul.Tensor, inverse, weight)
    scale = site.op(aten.mul.Scalar, scale, whole.shape[1] / whole.numel())
    slope = site.op(aten.mul.Tensor, site.op(aten.mul.Tensor, scale, inverse), sum_xhat)
    offset = site.op(aten.mul.Tensor, scale, sum_dy)
    offset = site.op(aten.sub.Tensor, offset, site.op(aten.mul.Tensor, slope, mean))
    slope, offset = (site.op(aten.view.default, node, shape) for node in (slope, offset))
    through = site.op(aten.add.Tensor, site.op(aten.mul.Tensor, x, slope), offset)
    d_x = site.op(aten.sub.Tensor, direct, site.cast(through, whole.dtype))
    return [
        node if wanted else None for node, wanted in zip((d_x, d_weight, d_bias), mask, strict=True)
    ]


def _variance(site: LoweringContext, inverse: fx.Node, eps: float) -> fx.Node:
    """The variance that an inverse deviation belongs to."""
    square = site.op(aten.mul.Tensor, inverse, inverse)
    return site.op(aten.sub.Scalar, site.op(aten.reciprocal.default, square), eps)


LOWERINGS: dict[str, Any] = {
    "batch_norm": ((FUNCTIONAL, WITHOUT_BUFFERS), _rows, _batch_norm),
    "batch_norm_backward": ((BACKWARD,), _rows_backward, _batch_norm_backward),
}
"""Targets, loops and lowering, by name."""
