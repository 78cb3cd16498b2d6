"""Own lowerings of norms, means and variances, a dim that they run over being sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced, Rule
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.operators.generic import reduced_dims

# -- layer norm --------------------------------------------------------------------------------


def _normalized(place: int) -> Callable[[Operator], range]:
    """The dims that are normalised: as many last ones as argument `place` names sizes."""

    def dims(operator: Operator) -> range:
        count = operator.operands[0].dim()
        return range(count - len(operator.args[place]), count)

    return dims


_FORWARD, _BACKWARD = _normalized(1), _normalized(2)


def _layer_norm_dims(operator: Operator) -> list[Loop]:
    """(input, normalized_shape, weight, bias, eps): each normalised dim."""
    source, *weights = operator.operands
    dims = _FORWARD(operator)
    return [
        Loop(
            source.shape[dim],
            (DimAccess(dim), *(DimAccess(dim - dims.start) for _ in weights)),
            (DimAccess(dim), None, None),
        )
        for dim in dims
    ]


def _layer_norm(site: LoweringContext) -> list[fx.Node | None]:
    source, _, weight, bias, eps = site.arguments.args
    dims, x = list(_FORWARD(site.operator)), site.upcast(source)
    mean, variance, offset = _moments(site, x, dims, 0)
    rstd = site.op(aten.rsqrt.default, site.op(aten.add.Scalar, variance, eps))
    made = site.op(aten.mul.Tensor, offset, rstd)
    if weight is not None:
        made = site.op(aten.mul.Tensor, made, weight)
    if bias is not None:
        made = site.op(aten.add.Tensor, made, bias)
    results = site.operator.results
    return [site.cast(n, t.dtype) for n, t in zip((made, mean, rstd), results, strict=True)]


def _layer_norm_backward_dims(operator: Operator) -> list[Loop]:
    """(gradient, input, normalized_shape, mean, rstd, weight, bias, mask): as the forward."""
    source = operator.operands[1]
    weights = operator.operands[4:]
    dims = _BACKWARD(operator)
    return [
        Loop(
            source.shape[dim],
            (
                DimAccess(dim),
                DimAccess(dim),
                None,
                None,
                *(DimAccess(dim - dims.start) for _ in weights),
            ),
            (DimAccess(dim), DimAccess(dim - dims.start), DimAccess(dim - dims.start)),
        )
        for dim in dims
    ]


def _layer_norm_backward(site: LoweringContext) -> list[fx.Node | None]:
    gradient, source, _, mean, rstd, weight, _, mask = site.arguments.args
    dims = list(_BACKWARD(site.operator))
    gradient, source = site.upcast(gradient), site.upcast(source)
    normal = site.op(aten.mul.Tensor, site.op(aten.sub.Tensor, source, mean), rstd)
    product = site.op(aten.mul.Tensor, gradient, normal)
    rows = list(range(dims[0]))
    made = None
    if mask[0]:
        scaled, crossed = gradient, product
        if weight is not None:
            scaled = site.op(aten.mul.Tensor, gradient, weight)
            crossed = site.op(aten.mul.Tensor, product, weight)
        first, second = _means(site, (scaled, crossed), dims)
        drift = site.op(aten.add.Tensor, first, site.op(aten.mul.Tensor, normal, second))
        made = site.op(aten.mul.Tensor, site.op(aten.sub.Tensor, scaled, drift), rstd)
    found = [
        made,
        _over_rows(site, product, rows) if mask[1] else None,
        _over_rows(site, gradient, rows) if mask[2] else None,
    ]
    return [
        None if n is None else site.cast(n, t.dtype)
        for n, t in zip(found, site.operator.results, strict=True)
    ]


def _over_rows(site: LoweringContext, node: fx.Node, rows: list[int]) -> fx.Node:
    return site.op(aten.sum.dim_IntList, node, rows) if rows else node


# -- means and variances -----------------------------------------------------------------------


def _over_dims(result: Reduced | None, place: int = 1) -> Rule:
    """The dims that are reduced; every result is whole or a part of a sum."""

    def rule(operator: Operator) -> list[Loop]:
        source = operator.operands[0]
        results = (result,) * len(operator.results)
        return [
            Loop(source.shape[dim], (DimAccess(dim),), results)
            for dim in reduced_dims(operator, place)
        ]

    return rule


def _mean(site: LoweringContext) -> list[fx.Node]:
    """A share of the mean: that of the shard, which is of so many of the elements."""
    args = site.arguments
    own = site.op(args.target, *args.args, **args.kwargs)
    whole = site.operator.operands[0].numel()
    return [site.op(aten.div.Scalar, own, whole / value(site.shards[0]).numel())]


def _variance(site: LoweringContext) -> list[fx.Node]:
    correction = site.operator.kwargs.get("correction")
    x = site.upcast(site.shards[0])
    dims = reduced_dims(site.operator, 1)
    mean, variance, _ = _moments(site, x, dims, 1 if correction is None else correction)
    results = site.operator.results
    if site.operator.target is aten.std.correction:
        variance = site.op(aten.sqrt.default, variance)
    return [
        site.cast(site.op(aten.view.default, n, list(t.shape)), t.dtype)
        for n, t in zip((variance, mean), results, strict=False)
    ]


def _is_euclidean(operator: Operator) -> list[Loop]:
    return _over_dims(None, 2)(operator) if operator.argument(1, "ord", 2) == 2 else []


def _vector_norm(site: LoweringContext) -> list[fx.Node]:
    x, result = site.upcast(site.shards[0]), site.operator.results[0]
    square = site.op(aten.mul.Tensor, x, x)
    (total,) = site.all_reduce(
        site.op(aten.sum.dim_IntList, square, reduced_dims(site.operator, 2))
    )
    norm = site.op(aten.view.default, site.op(aten.sqrt.default, total), list(result.shape))
    return [site.cast(norm, result.dtype)]


def _moments(
    site: LoweringContext, x: fx.Node, dims: Sequence[int], correction: float
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Mean and variance over dims of the whole, and how far x is from the mean.

    In two messages: the mean of squares less the square of the mean would cancel.
    """
    (mean,) = _means(site, (x,), dims)
    offset = site.op(aten.sub.Tensor, x, mean)
    (variance,) = _means(site, (site.op(aten.mul.Tensor, offset, offset),), dims, correction)
    return mean, variance, offset


def _means(
    site: LoweringContext, nodes: Sequence[fx.Node], dims: Sequence[int], correction: float = 0
) -> list[fx.Node]:
    """Sums over dims of the whole, over how many elements there are less a correction."""
    shape = site.operator.operands[0].shape
    count = math.prod(shape[dim] for dim in dims)
    sums = [site.op(aten.sum.dim_IntList, node, list(dims), True) for node in nodes]
    over = max(count - correction, 0)
    scale = 1 / over if over else float("inf")
    return [site.op(aten.mul.Scalar, total, scale) for total in site.all_reduce(*sums)]


LOWERINGS = {
    "layer_norm": ((aten.native_layer_norm.default,), _layer_norm_dims, _layer_norm),
    "layer_norm_backward": (
        (aten.native_layer_norm_backward.default,),
        _layer_norm_backward_dims,
        _layer_norm_backward,
    ),
    "mean": ((aten.mean.default, aten.mean.dim), _over_dims("sum"), _mean),
    "variance": (
        (aten.var.correction, aten.var_mean.correction, aten.std.correction),
        _over_dims(None),
        _variance,
    ),
    "vector_norm": ((aten.linalg_vector_norm.default,), _is_euclidean, _vector_norm),
}
"""Targets, loops and lowering, by name."""
