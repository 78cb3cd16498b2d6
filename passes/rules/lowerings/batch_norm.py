"""Custom lowerings of batch norm with sharded rows, exact by the statistics of all rows."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autopar.passes.rules.loops import Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.operators.generic import leading
from autopar.passes.rules.operators.structured import spatial

FUNCTIONAL = aten._native_batch_norm_legit_functional.default
WITHOUT_BUFFERS = aten._native_batch_norm_legit.no_stats
BACKWARD = aten.native_batch_norm_backward.default


def _rows(operator: Operator) -> list[Loop]:
    """(input, weight, bias, [mean, variance,] training, ...): rows, in training."""
    trains = operator.target is WITHOUT_BUFFERS or bool(operator.args[5])
    whole = (None,) * (len(operator.results) - 1)
    return leading(operator, spatial(operator), 1, whole) if trains else []


def _batch_norm(ctx: LoweringContext) -> list[fx.Node | None]:
    """Gathers the means and variances of all ranks and combines them.

    Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979.
    """
    x, weight, bias, *rest = ctx.arguments.args
    buffers = rest[:2] if ctx.operator.target is FUNCTIONAL else []
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
    normalized = ctx.op(
        aten._native_batch_norm_legit_no_training.default,
        x, weight, bias, mean, variance, momentum, eps,
    )  # fmt: skip
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

    variance = ctx.trace(lambda inverse: (inverse * inverse).reciprocal() - eps, inverse)
    constant = ctx.op(
        BACKWARD, dy, x, weight, mean, variance, mean, inverse, False, eps, [True, True, True]
    )
    direct, d_weight, d_bias = (ctx.op(getitem, constant, index) for index in range(3))
    sums = ctx.all_reduce(d_weight, d_bias)
    d_x = ctx.trace(input_gradient, direct, x, weight, mean, inverse, *sums)
    gradients = zip((d_x, d_weight, d_bias), mask, strict=True)
    return [node if wanted else None for node, wanted in gradients]


LOWERINGS: dict[str, Any] = {
    "batch_norm": ((FUNCTIONAL, WITHOUT_BUFFERS), _rows, _batch_norm),
    "batch_norm_backward": ((BACKWARD,), _rows_backward, _batch_norm_backward),
}
"""Targets, loops and lowering, by name."""
