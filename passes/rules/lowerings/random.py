"""Custom lowerings of random operators: every rank draws the whole, as one device would."""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch import fx

from autopar.passes.rules.loops import Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten

DRAW_LIKE = (
    "bernoulli.p rand_like randn_like randint_like randint_like.low_dtype uniform "
    "normal_functional exponential"
)
"""Operators that draw a tensor in the shape of another."""

DRAW_EACH = "bernoulli poisson"
"""Operators that draw by parameters of each element."""


def _dims(operator: Operator) -> list[Loop]:
    """Every dim of operands and results."""
    operands, results = len(operator.operands), len(operator.results)
    shape = operator.results[0].shape
    return [Loop.over(n, (dim,) * operands, (dim,) * results) for dim, n in enumerate(shape)]


def _dims_drawn(operator: Operator) -> list[Loop]:
    """Every dim of the result; operands are whole."""
    whole = (None,) * len(operator.operands)
    return [Loop.over(n, whole, (dim,)) for dim, n in enumerate(operator.results[0].shape)]


def _like(ctx: LoweringContext) -> list[fx.Node]:
    own, *args = ctx.arguments.args
    whole = ctx.op(aten.new_empty.default, own, list(ctx.operator.results[0].shape))
    return _drawn(ctx, whole, *args)


def _made(ctx: LoweringContext) -> list[fx.Node]:
    return _drawn(ctx, *ctx.arguments.args)


def _drawn(ctx: LoweringContext, *args: Any) -> list[fx.Node]:
    drawn = ctx.op(ctx.operator.target, *args, **ctx.arguments.kwargs)
    return [ctx.local_shard(drawn, ctx.op_strategy.results[0])]


def _dropout(ctx: LoweringContext) -> list[fx.Node]:
    """(input, p, train): the mask is drawn over ones."""
    source, p, train = ctx.arguments.args
    ones = ctx.op(aten.new_ones.default, source, list(ctx.operator.results[0].shape))
    pair = ctx.op(ctx.operator.target, ones, p, train)
    scale, mask = (
        ctx.local_shard(ctx.op(getitem, pair, place), placement)
        for place, placement in enumerate(ctx.op_strategy.results)
    )
    return [ctx.op(aten.mul.Tensor, source, scale), mask]


LOWERINGS: dict[str, Any] = {
    "draw_like": (DRAW_LIKE, _dims, _like),
    "draw": ("rand randn randint randint.low normal.float_float", _dims, _made),
    "draw_of": (DRAW_EACH, _dims_drawn, _made),
    "dropout": ("native_dropout", _dims, _dropout),
}
