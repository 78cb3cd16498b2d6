"""Custom lowerings of random operators: every rank draws the whole and keeps its shard.

Numbers and generator states are those of one device.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch import fx

from autopar.passes.rules.loops import Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten

DRAW_LIKE = (
    aten.bernoulli.p,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.exponential.default,
)
"""Operators that draw a tensor in the shape of another."""

DRAW_SHAPE = (
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.normal.float_float,
)
"""Operators that draw a tensor of a given shape."""

DRAW_EACH = (aten.bernoulli.default, aten.poisson.default)
"""Operators that draw by parameters of each element."""


def _dims(operator: Operator) -> list[Loop]:
    """Every dim of operands and results."""
    shape = operator.results[0].shape
    return [
        Loop.over(
            size,
            (dim,) * len(operator.operands),
            (dim,) * len(operator.results),
        )
        for dim, size in enumerate(shape)
    ]


def _dims_drawn(operator: Operator) -> list[Loop]:
    """Every dim of the result; operands are whole."""
    shape = operator.results[0].shape
    return [
        Loop.over(size, (None,) * len(operator.operands), (dim,)) for dim, size in enumerate(shape)
    ]


def _like(ctx: LoweringContext) -> list[fx.Node]:
    own, *args = ctx.arguments.args
    shape = list(ctx.operator.results[0].shape)
    whole = ctx.op(aten.new_empty.default, own, shape)
    return _drawn(ctx, whole, *args)


def _made(ctx: LoweringContext) -> list[fx.Node]:
    return _drawn(ctx, *ctx.arguments.args)


def _drawn(ctx: LoweringContext, *args: Any) -> list[fx.Node]:
    drawn = ctx.op(ctx.operator.target, *args, **ctx.arguments.kwargs)
    return [ctx.local_shard(drawn, ctx.op_strategy.results[0])]


def _dropout(ctx: LoweringContext) -> list[fx.Node]:
    """(input, p, train): the mask is drawn over ones."""
    source, p, train = ctx.arguments.args
    shape = list(ctx.operator.results[0].shape)
    ones = ctx.op(aten.new_ones.default, source, shape)
    pair = ctx.op(ctx.operator.target, ones, p, train)
    scale, mask = (
        ctx.local_shard(ctx.op(getitem, pair, place), placement)
        for place, placement in enumerate(ctx.op_strategy.results)
    )
    return [ctx.op(aten.mul.Tensor, source, scale), mask]


LOWERINGS: dict[str, Any] = {
    "draw_like": (DRAW_LIKE, _dims, _like),
    "draw": (DRAW_SHAPE, _dims, _made),
    "draw_of": (DRAW_EACH, _dims_drawn, _made),
    "dropout": ((aten.native_dropout.default,), _dims, _dropout),
}
"""Targets, loops and lowering, by name."""
