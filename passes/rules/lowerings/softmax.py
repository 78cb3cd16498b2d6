"""Custom lowerings of softmax, log-softmax and log-sum-exp along a sharded dim.

Ranks exchange one maximum and one sum of exponentials for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Rule
from autopar.passes.rules.lowerings.context import LoweringContext, aten


def _dim_of(index: int) -> Rule:
    """The dim that argument `index` names, in all operands and results."""

    def rule(operator: Operator) -> list[Loop]:
        first = operator.operands[0]
        if not first.dim():
            return []
        dim = operator.args[index] % first.dim()
        return [Loop.over(first.shape[dim], (dim,) * len(operator.operands), (dim,))]

    return rule


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
    source = operator.operands[0]
    dims = {dim % source.dim() for dim in operator.args[1]} if source.dim() else set()
    return [Loop(source.shape[dim], (DimAccess(dim),), (None,)) for dim in sorted(dims)]


def _logsumexp(ctx: LoweringContext) -> list[fx.Node | None]:
    x, dims = ctx.upcast(ctx.shards[0]), ctx.operator.args[1]
    (top,) = ctx.all_reduce(ctx.op(aten.amax.default, x, dims, True), op="max")
    top = ctx.trace(lambda top: top.masked_fill(top.isinf(), 0.0), top)
    _, _, total = _exponentials(ctx, x, top, dims)
    shape = list(ctx.operator.results[0].shape)
    return ctx.as_results(ctx.trace(lambda total, top: (total.log() + top).view(shape), total, top))


LOWERINGS: dict[str, Any] = {
    "softmax": (
        (aten._softmax.default,),
        _dim_of(1),
        _softmax(lambda top, shifted, powers, total: powers / total),
    ),
    "safe_softmax": (  # rows of minus infinity yield zeros
        (aten._safe_softmax.default,),
        _dim_of(1),
        _softmax(lambda top, _, powers, total: (powers / total).masked_fill(top == -math.inf, 0.0)),
    ),
    "log_softmax": (
        (aten._log_softmax.default,),
        _dim_of(1),
        _softmax(lambda top, shifted, powers, total: shifted - total.log()),
    ),
    "softmax_backward": ((aten._softmax_backward_data.default,), _dim_of(2), _softmax_backward),
    "log_softmax_backward": (
        (aten._log_softmax_backward_data.default,),
        _dim_of(2),
        _log_softmax_backward,
    ),
    "logsumexp": ((aten.logsumexp.default,), _reduced_dims, _logsumexp),
}
"""Targets, loops and lowering, by name."""
