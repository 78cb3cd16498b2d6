"""Custom lowerings of attention: with dropout, and over query heads that share key heads.

With dropout, each shard applies its part of the whole's draws. Query heads can be divided over more
ranks than there are key heads: a rank then reads the key heads of its query heads.
"""

from __future__ import annotations

from operator import getitem

from torch import fx

from autopar.core.ir.placement import Shard
from autopar.core.operators.attention import attention, attention_backward
from autopar.passes.core.node_builder import aten
from autopar.passes.rules.lowerings.context import LoweringContext
from autopar.passes.rules.operators.attention import query_heads, windows


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


def _key_heads(ctx: LoweringContext) -> list[fx.Node]:
    """A rank's query heads with the key heads that they share, or a copy of these for each."""
    heads, shared = (ctx.operator.argument(n).shape[1] for n in ("query", "key"))
    begin, width = ctx.chunk(heads)
    each = heads // shared
    groups = range(begin // each, (begin + width - 1) // each + 1)
    # All ranks copy or none does, so that they run the same operators.
    copies = bool(each % width and width % each)
    owners = [head // each for head in range(begin, begin + width)] if copies else groups

    def local(name: str) -> fx.Node:
        whole = ctx.arguments.argument(name)
        if not copies:
            return ctx.op(aten.slice.Tensor, whole, 1, groups[0], groups[-1] + 1)
        parts = [ctx.op(aten.slice.Tensor, whole, 1, group, group + 1) for group in owners]
        return ctx.op(aten.cat.default, parts, 1)

    def spread(gradient: fx.Node) -> fx.Node:
        """The gradient of all key heads, with zeros where this rank has no query head."""
        if copies:
            sums = []
            for group in groups:
                first, count = owners.index(group), owners.count(group)
                part = ctx.op(aten.slice.Tensor, gradient, 1, first, first + count)
                sums.append(ctx.op(aten.sum.dim_IntList, part, [1], True))
            gradient = ctx.op(aten.cat.default, sums, 1)
        pads = [0, 0, 0, 0, groups[0], shared - groups[-1] - 1]
        return ctx.op(aten.constant_pad_nd.default, gradient, pads)

    names = [argument.name for argument in ctx.operator.target._schema.arguments]
    given = {name: ctx.arguments.argument(name) for name in names}
    given |= {name: local(name) for name in ("key", "value")}
    node = ctx.op(ctx.operator.target, *given.values())
    results = [ctx.op(getitem, node, index) for index in range(len(ctx.operator.results))]
    if ctx.operator.target is attention_backward:
        results[1:3] = map(spread, results[1:3])
    return results


LOWERINGS = {
    "attention_window": ((attention, attention_backward), windows, _window),
    "attention_query_heads": ((attention, attention_backward), query_heads, _key_heads),
}
