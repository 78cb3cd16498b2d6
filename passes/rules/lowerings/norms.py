"""Custom lowerings of norms, means and variances along a sharded dim, and of batch norm rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.rules.loops import Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.operators.generic import leading, over_dims, reduced_dims
from autopar.passes.rules.operators.structured import spatial

# -- layer norm --------------------------------------------------------------------------------


def _normalized_dims(operator: Operator) -> range:
    """The normalized dims, which are the last ones."""
    count = operator.operands[0].dim()
    return range(count - len(operator.argument("normalized_shape")), count)


def _layer_norm_dims(operator: Operator) -> list[Loop]:
    """(input, normalized_shape, weight, bias, eps): each normalized dim."""
    source, *weights = operator.operands
    return [
        Loop.over(source.shape[dim], (dim, *(index for _ in weights)), (dim, None, None))
        for index, dim in enumerate(_normalized_dims(operator))
    ]


def _layer_norm(ctx: LoweringContext) -> list[fx.Node | None]:
    source, _, weight, bias, eps = ctx.arguments.args
    dims = _normalized_dims(ctx.operator)
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
    return [
        Loop.over(
            source.shape[dim],
            (dim, dim, None, None, *(index for _ in weights)),
            (dim, index, index),
        )
        for index, dim in enumerate(_normalized_dims(operator))
    ]


def _layer_norm_backward(ctx: LoweringContext) -> list[fx.Node | None]:
    gradient, source, _, mean, rstd, weight, _, mask = ctx.arguments.args
    dims = _normalized_dims(ctx.operator)
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


def _mean(ctx: LoweringContext) -> list[fx.Node | None]:
    """The mean of the shard, times its fraction of the elements."""
    args = ctx.arguments
    local = ctx.op(args.target, *args.args, **args.kwargs)
    whole = ctx.operator.operands[0].numel()
    return [ctx.op(aten.div.Scalar, local, whole / value(ctx.shards[0]).numel())]


def _variance(ctx: LoweringContext) -> list[fx.Node | None]:
    correction = ctx.operator.kwargs.get("correction")
    dims = reduced_dims(ctx.operator)
    correction = 1 if correction is None else correction
    mean, variance, _ = _moments(ctx, ctx.upcast(ctx.shards[0]), dims, correction)
    if ctx.operator.target is aten.std.correction:
        variance = ctx.op(aten.sqrt.default, variance)
    pairs = zip((variance, mean), ctx.operator.results, strict=False)
    return ctx.as_results(*(ctx.op(aten.view.default, n, list(t.shape)) for n, t in pairs))


def _euclidean_dims(operator: Operator) -> list[Loop]:
    return over_dims(None)(operator) if operator.argument("ord") == 2 else []


def _vector_norm(ctx: LoweringContext) -> list[fx.Node | None]:
    x, dims = ctx.upcast(ctx.shards[0]), reduced_dims(ctx.operator)
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


# -- batch norm ---------------------------------------------------------------------------------


def _rows(operator: Operator) -> list[Loop]:
    """(input, weight, bias, [mean, variance,] training, ...): rows, in training."""
    trains = operator.target is aten._native_batch_norm_legit.no_stats or operator.args[5]
    whole = (None,) * (len(operator.results) - 1)
    return leading(operator, spatial(operator), 1, whole) if trains else []


def _batch_norm(ctx: LoweringContext) -> list[fx.Node | None]:
    """Gathers the means and variances of all ranks and combines them.

    Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979.
    """
    x, weight, bias, *rest = ctx.arguments.args
    functional = ctx.operator.target is aten._native_batch_norm_legit_functional.default
    buffers = rest[:2] if functional else []
    momentum, eps = ctx.arguments.args[-2:]
    whole, fraction = ctx.operator.operands[0], value(x).numel() / ctx.operator.operands[0].numel()
    channels, dims = whole.shape[1], [0, *range(2, whole.dim())]
    count = whole.numel() // channels

    def local_moments(x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dims, correction=0)
        return torch.cat([mean, variance, torch.full_like(mean[:1], fraction)])

    def combined(table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        means, variances, fractions = table.split([channels, channels, 1], 1)
        mean = (means * fractions).sum([0])
        offset = means - mean
        variance = ((variances + offset * offset) * fractions).sum([0])
        return mean, variance, torch.rsqrt(variance + eps)

    def updated(mean: Tensor, variance: Tensor, buffers: list[Tensor]) -> list[Tensor]:
        unbiased = variance * (count / max(count - 1, 1))
        return [
            old * (1.0 - momentum) + (new * momentum).to(old.dtype)
            for old, new in zip(buffers, (mean, unbiased), strict=True)
        ]

    table = ctx.gather_stacked(ctx.trace(local_moments, ctx.upcast(x)))
    mean, variance, inverse = ctx.trace(combined, table)
    args = (x, weight, bias, mean, variance, momentum, eps)
    normalized = ctx.op(aten._native_batch_norm_legit_no_training.default, *args)
    new_buffers = ctx.trace(updated, mean, variance, buffers) if buffers else []
    return ctx.as_results(ctx.op(getitem, normalized, 0), mean, inverse, *new_buffers)


def _rows_backward(operator: Operator) -> list[Loop]:
    """(gradient, input, weight, means, variances, mean, rstd, training, eps, mask): rows.

    The gradients of weight and bias are partial sums over rows.
    """
    return leading(operator, spatial(operator), 2, ("sum", "sum")) if operator.args[7] else []


def _batch_norm_backward(ctx: LoweringContext) -> list[fx.Node | None]:
    """The backward with the statistics as constants, less the gradient through the statistics.

    dx = w / s (dy - mean(dy) - xhat mean(dy xhat)), with s the standard deviation, xhat the
    normalized input, and means over all rows. Source: Ioffe, Szegedy, Batch Normalization, 2015,
    section 3.
    """
    dy, x, weight, _, _, mean, inverse, _, eps, mask = ctx.arguments.args
    whole = ctx.operator.operands[1]
    fraction = whole.shape[1] / whole.numel()
    shape = [1, -1] + [1] * (whole.dim() - 2)

    def input_gradient(
        direct: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, inverse: Tensor,
        sum_xhat: Tensor, sum_dy: Tensor,
    ) -> Tensor:  # fmt: skip
        scale = (inverse if weight is None else inverse * weight) * fraction
        slope = scale * inverse * sum_xhat
        offset = scale * sum_dy - slope * mean
        return direct - (x * slope.view(shape) + offset.view(shape)).to(whole.dtype)

    # Outside of training, kernels read running statistics and ignore the saved inverse.
    variance = ctx.trace(lambda inverse: (inverse * inverse).reciprocal() - eps, inverse)
    args = (x, weight, mean, variance, mean, inverse, False, eps, [True, True, True])
    constant = ctx.op(ctx.operator.target, dy, *args)
    direct, d_weight, d_bias = (ctx.op(getitem, constant, index) for index in range(3))
    sums = ctx.all_reduce(d_weight, d_bias)
    d_x = ctx.trace(input_gradient, direct, x, weight, mean, inverse, *sums)
    gradients = zip((d_x, d_weight, d_bias), mask, strict=True)
    return [node if wanted else None for node, wanted in gradients]


LOWERINGS: dict[str, Any] = {
    "layer_norm": ("native_layer_norm", _layer_norm_dims, _layer_norm),
    "layer_norm_backward": (
        "native_layer_norm_backward",
        _layer_norm_backward_dims,
        _layer_norm_backward,
    ),
    "mean": ("mean mean.dim", over_dims("sum"), _mean),
    "variance": ("var.correction var_mean.correction std.correction", over_dims(None), _variance),
    "vector_norm": ("linalg_vector_norm", _euclidean_dims, _vector_norm),
    "batch_norm": (
        "_native_batch_norm_legit_functional _native_batch_norm_legit.no_stats",
        _rows,
        _batch_norm,
    ),
    "batch_norm_backward": ("native_batch_norm_backward", _rows_backward, _batch_norm_backward),
}
