"""Rules of the products of rows with their experts, and the lowering that divides the experts.

A rank computes the products of its own experts' rows, and zeros for other rows: a partial sum.
Nothing is sent.
"""

from __future__ import annotations

from torch import fx

from autopar.core.ir.placement import Routed
from autopar.core.operators.experts import expert_mm, expert_outer
from autopar.passes.rules.loops import Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext


def products(operator: Operator) -> list[Loop]:
    """(rows [r, k], weight [e, k, n], experts [r]) -> [r, n]: rows, width and columns."""
    (rows, width), columns = operator.operands[0].shape, operator.operands[1].shape[2]
    return [
        Loop.over(rows, (0, None, 0), (0,)),
        Loop.over(columns, (None, 2, None), (1,)),
        Loop.over(width, (1, 1, None), ("sum",)),
    ]


def outer_products(operator: Operator) -> list[Loop]:
    """(rows [r, k], gradients [r, n], experts [r]) -> [e, k, n]: rows, width and columns."""
    (rows, width), columns = operator.operands[0].shape, operator.operands[1].shape[1]
    return [
        Loop.over(rows, (0, 0, 0), ("sum",)),
        Loop.over(width, (1, None, None), (1,)),
        Loop.over(columns, (None, 1, None), (2,)),
    ]


def _experts(operator: Operator) -> list[Loop]:
    count = operator.operands[1].shape[0]
    return [Loop.over(count, (None, 0, None), ("sum",), interleavable=False)]


def _mm(ctx: LoweringContext) -> list[fx.Node]:
    rows, weight, experts = ctx.shards
    count = ctx.operator.operands[1].shape[0]
    first, total = _part(ctx, count)
    return [ctx.op(expert_mm, rows, weight, experts, first, total)]


def _experts_of_result(operator: Operator) -> list[Loop]:
    return [Loop.over(operator.args[3], (None, None, None), (0,), interleavable=False)]


def _outer(ctx: LoweringContext) -> list[fx.Node]:
    rows, gradients, experts = ctx.shards
    count = ctx.operator.args[3]
    first, total = _part(ctx, count)
    return [ctx.op(expert_outer, rows, gradients, experts, ctx.chunk(count)[1], first, total)]


def _part(ctx: LoweringContext, count: int) -> tuple[int, int]:
    """This rank's first expert, and how many there are in all rows: 0 in routed ones, its own."""
    first, total = (ctx.operator.argument(name) for name in ("first", "total"))
    is_routed = isinstance(ctx.op_strategy.operands[0], Routed)
    return first + ctx.chunk(count)[0], 0 if is_routed else total or count


LOWERINGS = {
    "experts": ((expert_mm,), _experts, _mm),
    "experts_outer": ((expert_outer,), _experts_of_result, _outer),
}
