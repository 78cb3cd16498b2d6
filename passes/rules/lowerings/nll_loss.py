"""Custom lowerings of the negative log-likelihood with sharded classes, or rows of a mean.

Together with those of log-softmax, a cross-entropy over a sharded vocabulary sends a few numbers
for each row and never gathers the logits.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.lowerings.embedding import local_indices, zero_unless
from autopar.passes.rules.operators.structured import target_dims

NONE, MEAN, SUM = 0, 1, 2
LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


def _classes(operator: Operator) -> list[Loop]:
    """(log-probabilities [rows, classes, ...], targets, weights, reduction, ignored): classes."""
    source, *others = operator.operands
    if source.dim() < 2:
        return []
    rest = (None,) * len(others)
    return [Loop(source.shape[1], (DimAccess(1), *rest), ("sum", None), interleavable=False)]


def _nll_loss(ctx: LoweringContext) -> list[fx.Node]:
    log, target, weights, reduction, ignored = ctx.arguments.args
    local, known = local_indices(ctx, target, ctx.operator.operands[0].shape[1])
    column = ctx.op(aten.unsqueeze.default, local, 1)
    found = ctx.op(aten.squeeze.dim, ctx.op(aten.gather.default, log, 1, column), 1)
    counted = ctx.op(aten.ne.Scalar, target, ignored)
    each = _weights(ctx, target, counted, weights, value(log).dtype)
    loss = ctx.op(aten.neg.default, ctx.op(aten.mul.Tensor, found, each))
    loss = zero_unless(ctx, ctx.op(aten.logical_and.default, known, counted), loss)
    if reduction == NONE:
        return [loss, ctx.op(aten.new_zeros.default, log, [])]
    total = ctx.op(aten.sum.default, each)
    loss = ctx.op(aten.sum.default, loss)
    return [ctx.op(aten.div.Tensor, loss, total) if reduction == MEAN else loss, total]


def _weights(
    ctx: LoweringContext,
    target: fx.Node,
    counted: fx.Node,
    weights: fx.Node | None,
    dtype: torch.dtype,
) -> fx.Node:
    """The weight of each row: of its class or 1, and 0 if it is ignored."""
    if weights is None:
        return ctx.cast(counted, dtype)
    number = ctx.op(aten.where.ScalarOther, counted, target, 0)
    return zero_unless(ctx, counted, ctx.op(aten.index.Tensor, weights, [number]))


def _rows(operator: Operator) -> list[Loop]:
    """Arguments as in `_classes`: the loops of a mean, all dims but classes."""
    source, *others = operator.operands
    rest = (None,) * (len(others) - 1)
    return [
        Loop.over(source.shape[dim], (dim, place, *rest), (None, None))
        for dim, place in target_dims(source)
        if operator.args[3] == MEAN
    ]


def _nll_loss_rows(ctx: LoweringContext) -> list[fx.Node]:
    """Sums the loss and the weight of all rows in one message, and divides."""
    log, target, weights, _, ignored = ctx.arguments.args
    pair = ctx.op(ctx.operator.target, log, target, weights, SUM, ignored)
    sums = [ctx.op(getitem, pair, 0), _total(ctx, pair)]
    sums = ctx.all_reduce(*(ctx.cast(node, torch.float64) for node in sums))
    loss, total = (ctx.cast(node, value(log).dtype) for node in sums)
    return [ctx.op(aten.div.Tensor, loss, total), total]


def _total(ctx: LoweringContext, pair: fx.Node) -> fx.Node:
    """The weight of this rank's rows, which depends on targets alone, not on the loss."""
    log, target, weights, _, ignored = ctx.arguments.args
    if weights is not None:
        return ctx.op(getitem, pair, 1)
    counted = ctx.op(aten.ne.Scalar, target, ignored)
    return ctx.op(aten.sum.default, counted, dtype=value(log).dtype)


def _classes_backward(operator: Operator) -> list[Loop]:
    """(gradient, log-probabilities, targets, weights, reduction, ignored, total): classes."""
    _, source, *others = operator.operands
    if source.dim() < 2:
        return []
    rest = (None,) * len(others)
    return [Loop.over(source.shape[1], (None, 1, *rest), (1,), interleavable=False)]


def _nll_loss_backward(ctx: LoweringContext) -> list[fx.Node]:
    gradient, log, target, weights, reduction, ignored, total = ctx.arguments.args
    local, known = local_indices(ctx, target, ctx.operator.operands[1].shape[1])
    each = ctx.op(aten.neg.default, gradient)
    if reduction == MEAN:
        each = ctx.op(aten.div.Tensor, each, total)
    counted = ctx.op(aten.ne.Scalar, target, ignored)
    counts = _weights(ctx, target, counted, weights, value(log).dtype)
    known = ctx.op(aten.logical_and.default, known, counted)
    each = zero_unless(ctx, known, ctx.op(aten.mul.Tensor, each, counts))
    zeros = ctx.op(aten.new_zeros.default, log, list(value(log).shape))
    local, each = (ctx.op(aten.unsqueeze.default, n, 1) for n in (local, each))
    return [ctx.op(aten.scatter.src, zeros, 1, local, each)]


LOWERINGS: dict[str, Any] = {
    "nll_loss": (LOSSES, _classes, _nll_loss),
    "nll_loss_rows": (LOSSES, _rows, _nll_loss_rows),
    "nll_loss_backward": (BACKWARD, _classes_backward, _nll_loss_backward),
}
"""Targets, loops and lowering, by name."""
