"""Custom lowering of attention with dropout: each shard applies its part of the whole's draws."""

from __future__ import annotations

from operator import getitem

from torch import fx

from autopar.ir.placement import Shard
from autopar.operators.attention import attention, attention_backward
from autopar.passes.rules.lowerings.context import LoweringContext
from autopar.passes.rules.operators.attention import windows


def _window(ctx: LoweringContext) -> list[fx.Node]:
    query, placement = ctx.operator.argument("query"), ctx.op_strategy.results[0]
    window = list(ctx.operator.argument("window"))
    if not window:
        window = [number for size in query.shape[:3] for number in (size, 0)]
    if isinstance(placement, Shard):
        window[2 * placement.dim + 1] += ctx.chunk(query.shape[placement.dim])[0]
    names = [argument.name for argument in ctx.operator.target._schema.arguments]
    given = [ctx.arguments.argument(name) for name in names[:-1]]
    node = ctx.op(ctx.operator.target, *given, window)
    return [ctx.op(getitem, node, index) for index in range(len(ctx.operator.results))]


LOWERINGS = {"attention_window": ((attention, attention_backward), windows, _window)}
