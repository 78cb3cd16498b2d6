"""Custom lowerings of softmax, log-softmax and log-sum-exp along a sharded dim.

Ranks exchange one maximum and one sum of exponentials for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from autopar.passes.rules.loops import Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten
from autopar.passes.rules.operators.generic import over_dims, own_dim


def _exponentials(
    ctx: LoweringContext, x: fx.Node, top: fx.Node, dims: list[int]
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """X less the maximum, the exponentials of that, and their sum over the whole dims."""

    def shifted_exp(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = x - top
        powers = shifted.exp()
        return shifted, powers, powers.sum(dims, True)

    shifted, powers, partial = ctx.trace(shifted_exp, x, top)
    (total,) = ctx.all_reduce(partial)
    return shifted, powers, total


def _softmax(
    result: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Callable[[LoweringContext], list[fx.Node | None]]:
    """A softmax whose result is a function of maximum, shifted input, exponentials and sum."""

    def lower(ctx: LoweringContext) -> list[fx.Node | None]:
        x, dims = ctx.upcast(ctx.shards[0]), [ctx.shard.dim]
        (top,) = ctx.all_reduce(ctx.op(aten.amax.default, x, dims, True), op="max")
        shifted, powers, total = _exponentials(ctx, x, top, dims)
        return ctx.as_results(ctx.trace(result, top, shifted, powers, total))

    return lower


def _softmax_backward(ctx: LoweringContext) -> list[fx.Node | None]:
    gradient, result = map(ctx.upcast, ctx.shards)
    product = ctx.op(aten.mul.Tensor, gradient, result)
    (total,) = ctx.all_reduce(ctx.op(aten.sum.dim_IntList, product, [ctx.shard.dim], True))
    return ctx.as_results(ctx.trace(lambda p, y, t: p - y * t, product, result, total))


def _log_softmax_backward(ctx: LoweringContext) -> list[fx.Node | None]:
    gradient, log = map(ctx.upcast, ctx.shards)
    (total,) = ctx.all_reduce(ctx.op(aten.sum.dim_IntList, gradient, [ctx.shard.dim], True))
    return ctx.as_results(ctx.trace(lambda g, y, t: g - y.exp() * t, gradient, log, total))


def _reduced_dims(operator: Operator) -> list[Loop]:
    """(source, dims, keepdim): each reduced dim; the result is whole."""
    return over_dims(None)(operator) if operator.args[1] else []


def _logsumexp(ctx: LoweringContext) -> list[fx.Node | None]:
    x, dims = ctx.upcast(ctx.shards[0]), ctx.operator.args[1]
    (top,) = ctx.all_reduce(ctx.op(aten.amax.default, x, dims, True), op="max")
    # An infinite maximum less itself is NaN; torch's logsumexp subtracts 0 there, too.
    top = ctx.trace(lambda top: top.masked_fill(top.isinf(), 0.0), top)
    _, _, total = _exponentials(ctx, x, top, dims)
    shape = list(ctx.operator.results[0].shape)
    return ctx.as_results(ctx.trace(lambda total, top: (total.log() + top).view(shape), total, top))


LOWERINGS: dict[str, Any] = {
    "softmax": (
        "_softmax",
        own_dim(),
        _softmax(lambda top, shifted, powers, total: powers / total),
    ),
    "safe_softmax": (  # rows of minus infinity yield zeros
        "_safe_softmax",
        own_dim(),
        _softmax(lambda top, _, powers, total: (powers / total).masked_fill(top == -math.inf, 0.0)),
    ),
    "log_softmax": (
        "_log_softmax",
        own_dim(),
        _softmax(lambda top, shifted, powers, total: shifted - total.log()),
    ),
    "softmax_backward": ("_softmax_backward_data", own_dim(), _softmax_backward),
    "log_softmax_backward": ("_log_softmax_backward_data", own_dim(), _log_softmax_backward),
    "logsumexp": ("logsumexp", _reduced_dims, _logsumexp),
}
