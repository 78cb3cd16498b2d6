"""Custom lowerings of norms, means and variances along a sharded dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced, Rule
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.operators.generic import reduced_dims

# -- layer norm --------------------------------------------------------------------------------


def _normalized_dims(operator: Operator, index: int) -> range:
    """The normalized dims, which are the last ones; argument `index` has their sizes."""
    count = operator.operands[0].dim()
    return range(count - len(operator.args[index]), count)


def _layer_norm_dims(operator: Operator) -> list[Loop]:
    """(input, normalized_shape, weight, bias, eps): each normalized dim."""
    source, *weights = operator.operands
    dims = _normalized_dims(operator, 1)
    return [
        Loop.over(
            source.shape[dim],
            (dim, *(dim - dims.start for _ in weights)),
            (dim, None, None),
        )
        for dim in dims
    ]


def _layer_norm(ctx: LoweringContext) -> list[fx.Node | None]:
    source, _, weight, bias, eps = ctx.arguments.args
    dims = _normalized_dims(ctx.operator, 1)
    mean, variance, offset = _moments(ctx, ctx.upcast(source), dims)

    def normalized(
        variance: Tensor, offset: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rstd = torch.rsqrt(variance + eps)
        result = offset * rstd
        result = result if weight is None else result * weight
        return result if bias is None else result + bias, rstd

    result, rstd = ctx.trace(normalized, variance, offset, weight, bias)
    return ctx.as_results(result, mean, rstd)


def _layer_norm_backward_dims(operator: Operator) -> list[Loop]:
    """(gradient, input, normalized_shape, mean, rstd, weight, bias, mask): each normalized dim."""
    _, source, _, _, *weights = operator.operands
    loops = []
    for index, dim in enumerate(_normalized_dims(operator, 2)):
        own, of_weight = DimAccess(dim), DimAccess(index)
        operands = (own, own, None, None, *(of_weight for _ in weights))
        loops.append(Loop(source.shape[dim], operands, (own, of_weight, of_weight)))
    return loops


def _layer_norm_backward(ctx: LoweringContext) -> list[fx.Node | None]:
    gradient, source, _, mean, rstd, weight, _, mask = ctx.arguments.args
    dims = _normalized_dims(ctx.operator, 2)
    gradient, source = ctx.upcast(gradient), ctx.upcast(source)

    def products(gradient: Tensor, source: Tensor, mean: Tensor, rstd: Tensor) -> list[Tensor]:
        normal = (source - mean) * rstd
        return [normal, gradient * normal]

    def input_gradient(
        scaled: Tensor, normal: Tensor, rstd: Tensor, first: Tensor, second: Tensor
    ) -> Tensor:
        return (scaled - (first + normal * second)) * rstd

    def over_rows(node: fx.Node) -> fx.Node:
        rows = list(range(dims.start))
        return ctx.op(aten.sum.dim_IntList, node, rows) if rows else node

    normal, product = ctx.trace(products, gradient, source, mean, rstd)
    d_input = None
    if mask[0]:
        scaled, crossed = gradient, product
        if weight is not None:
            scaled, crossed = (ctx.op(aten.mul.Tensor, n, weight) for n in (gradient, product))
        means = _means(ctx, (scaled, crossed), dims)
        d_input = ctx.trace(input_gradient, scaled, normal, rstd, *means)
    return ctx.as_results(
        d_input, over_rows(product) if mask[1] else None, over_rows(gradient) if mask[2] else None
    )


# -- means and variances -----------------------------------------------------------------------


def _over_dims(result: Reduced | None, index: int = 1) -> Rule:
    """The dims that argument `index` reduces; every result is whole or a partial sum."""

    def rule(operator: Operator) -> list[Loop]:
        shape, results = operator.operands[0].shape, (result,) * len(operator.results)
        dims = reduced_dims(operator, index)
        return [Loop(shape[dim], (DimAccess(dim),), results) for dim in dims]

    return rule


def _mean(ctx: LoweringContext) -> list[fx.Node | None]:
    """The mean of the shard, times its fraction of the elements."""
    args = ctx.arguments
    local = ctx.op(args.target, *args.args, **args.kwargs)
    whole = ctx.operator.operands[0].numel()
    return [ctx.op(aten.div.Scalar, local, whole / value(ctx.shards[0]).numel())]


def _variance(ctx: LoweringContext) -> list[fx.Node | None]:
    correction = ctx.operator.kwargs.get("correction")
    dims = reduced_dims(ctx.operator, 1)
    correction = 1 if correction is None else correction
    mean, variance, _ = _moments(ctx, ctx.upcast(ctx.shards[0]), dims, correction)
    if ctx.operator.target is aten.std.correction:
        variance = ctx.op(aten.sqrt.default, variance)
    pairs = zip((variance, mean), ctx.operator.results, strict=False)
    return ctx.as_results(*(ctx.op(aten.view.default, n, list(t.shape)) for n, t in pairs))


def _is_euclidean(operator: Operator) -> list[Loop]:
    return _over_dims(None, 2)(operator) if operator.argument(1, "ord", 2) == 2 else []


def _vector_norm(ctx: LoweringContext) -> list[fx.Node | None]:
    x, dims = ctx.upcast(ctx.shards[0]), reduced_dims(ctx.operator, 2)
    (total,) = ctx.all_reduce(ctx.trace(lambda x: (x * x).sum(dims), x))
    shape = list(ctx.operator.results[0].shape)
    return ctx.as_results(ctx.trace(lambda total: total.sqrt().view(shape), total))


def _moments(
    ctx: LoweringContext, x: fx.Node, dims: Sequence[int], correction: float = 0
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Mean and variance over whole dims, and the offset of x from the mean.

    Two messages: the mean of squares less the square of the mean would cancel.
    """

    def offset_and_square(x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        offset = x - mean
        return offset, offset * offset

    (mean,) = _means(ctx, (x,), dims)
    offset, square = ctx.trace(offset_and_square, x, mean)
    (variance,) = _means(ctx, (square,), dims, correction)
    return mean, variance, offset


def _means(
    ctx: LoweringContext, nodes: Sequence[fx.Node], dims: Sequence[int], correction: float = 0
) -> list[fx.Node]:
    """Sums over whole dims, divided by the number of elements less a correction."""
    shape = ctx.operator.operands[0].shape
    sums = [ctx.op(aten.sum.dim_IntList, node, list(dims), True) for node in nodes]
    count = max(math.prod(shape[dim] for dim in dims) - correction, 0)
    scale = 1 / count if count else float("inf")
    return [ctx.op(aten.mul.Scalar, total, scale) for total in ctx.all_reduce(*sums)]


LOWERINGS: dict[str, Any] = {
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
