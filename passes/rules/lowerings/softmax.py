"""Own lowerings of softmax and its kin, the dim that they run over being sharded.

Only statistics of rows are sent: the maximum, then the sum of the exponentials.
"""

from __future__ import annotations

import math

from torch import fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator, Rule
from autopar.passes.rules.lowerings.context import LoweringContext, aten


def _own_dim(place: int) -> Rule:
    """The dim that argument `place` names, in all operands and results."""

    def rule(operator: Operator) -> list[Loop]:
        first = operator.operands[0]
        if not first.dim():
            return []
        dim = operator.args[place] % first.dim()
        at = tuple(DimAccess(dim) for _ in operator.operands)
        return [Loop(first.shape[dim], at, (DimAccess(dim),))]

    return rule


def _exponentials(site: LoweringContext, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The maximum over the dim, x less it, and the exponentials of that."""
    (top,) = site.all_reduce(site.op(aten.amax.default, x, [dim], True), op="max")
    shifted = site.op(aten.sub.Tensor, x, top)
    return top, shifted, site.op(aten.exp.default, shifted)


def _sum(site: LoweringContext, x: fx.Node, dim: int) -> fx.Node:
    (total,) = site.all_reduce(site.op(aten.sum.dim_IntList, x, [dim], True))
    return total


def _softmax(site: LoweringContext) -> list[fx.Node]:
    x, dim = site.upcast(site.arguments.args[0]), site.shard.dim
    _, _, powers = _exponentials(site, x, dim)
    share = site.op(aten.div.Tensor, powers, _sum(site, powers, dim))
    return [site.cast(share, site.operator.results[0].dtype)]


def _safe_softmax(site: LoweringContext) -> list[fx.Node]:
    """A row of minus infinities yields zeros."""
    x, dim = site.upcast(site.arguments.args[0]), site.shard.dim
    top, _, powers = _exponentials(site, x, dim)
    share = site.op(aten.div.Tensor, powers, _sum(site, powers, dim))
    empty = site.op(aten.eq.Scalar, top, -math.inf)
    share = site.op(aten.masked_fill.Scalar, share, empty, 0.0)
    return [site.cast(share, site.operator.results[0].dtype)]


def _log_softmax(site: LoweringContext) -> list[fx.Node]:
    x, dim = site.upcast(site.arguments.args[0]), site.shard.dim
    _, shifted, powers = _exponentials(site, x, dim)
    total = site.op(aten.log.default, _sum(site, powers, dim))
    log = site.op(aten.sub.Tensor, shifted, total)
    return [site.cast(log, site.operator.results[0].dtype)]


def _softmax_backward(site: LoweringContext) -> list[fx.Node]:
    gradient, share = map(site.upcast, site.shards)
    product = site.op(aten.mul.Tensor, gradient, share)
    total = _sum(site, product, site.shard.dim)
    made = site.op(aten.sub.Tensor, product, site.op(aten.mul.Tensor, share, total))
    return [site.cast(made, site.operator.results[0].dtype)]


def _log_softmax_backward(site: LoweringContext) -> list[fx.Node]:
    gradient, log = map(site.upcast, site.shards)
    total = _sum(site, gradient, site.shard.dim)
    taken = site.op(aten.mul.Tensor, site.op(aten.exp.default, log), total)
    made = site.op(aten.sub.Tensor, gradient, taken)
    return [site.cast(made, site.operator.results[0].dtype)]


def _summed_dims(operator: Operator) -> list[Loop]:
    """(source, dims, keepdim): each dim that is summed over; the result is whole."""
    source = operator.operands[0]
    dims = {dim % source.dim() for dim in operator.args[1]} if source.dim() else set()
    return [Loop(source.shape[dim], (DimAccess(dim),), (None,)) for dim in sorted(dims)]


def _logsumexp(site: LoweringContext) -> list[fx.Node]:
    x, dims = site.upcast(site.shards[0]), site.operator.args[1]
    (top,) = site.all_reduce(site.op(aten.amax.default, x, dims, True), op="max")
    top = site.op(aten.masked_fill.Scalar, top, site.op(aten.isinf.default, top), 0.0)
    powers = site.op(aten.exp.default, site.op(aten.sub.Tensor, x, top))
    (total,) = site.all_reduce(site.op(aten.sum.dim_IntList, powers, dims, True))
    log = site.op(aten.add.Tensor, site.op(aten.log.default, total), top)
    result = site.operator.results[0]
    return [site.cast(site.op(aten.view.default, log, list(result.shape)), result.dtype)]


LOWERINGS = {
    "softmax": ((aten._softmax.default,), _own_dim(1), _softmax),
    "safe_softmax": ((aten._safe_softmax.default,), _own_dim(1), _safe_softmax),
    "log_softmax": ((aten._log_softmax.default,), _own_dim(1), _log_softmax),
    "softmax_backward": (
        (aten._softmax_backward_data.default,),
        _own_dim(2),
        _softmax_backward,
    ),
    "log_softmax_backward": (
        (aten._log_softmax_backward_data.default,),
        _own_dim(2),
        _log_softmax_backward,
    ),
    "logsumexp": ((aten.logsumexp.default,), _summed_dims, _logsumexp),
}
"""Targets, loops and lowering, by name."""
