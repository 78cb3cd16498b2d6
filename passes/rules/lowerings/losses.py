"""Rules and custom lowerings of losses.

| loss | lowered dims |
|---|---|
| negative log-likelihood | classes, so that sharded logits are never gathered; rows of a mean |
| element by element | every dim of a mean: a shard is summed and divided by the whole's elements |
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.loops import Access, Loop, Operator, Rule, broadcast_access
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.lowerings.embedding import local_indices, zero_unless
from autopar.passes.rules.operators.structured import target_dims

NONE, MEAN, SUM = 0, 1, 2

# -- negative log-likelihood --------------------------------------------------------------------


def _classes(place: int, *results: Access | int) -> Rule:
    """The classes of log-probabilities [rows, classes, ...], which are operand `place`."""

    def rule(operator: Operator) -> list[Loop]:
        places = [1 if i == place else None for i in range(len(operator.operands))]
        sizes = operator.operands[place].shape[1:2]
        return [Loop.over(size, places, results, interleavable=False) for size in sizes]

    return rule


def _nll_loss(ctx: LoweringContext) -> list[fx.Node]:
    log, target, weights, reduction, ignored = ctx.arguments.args
    local, known = local_indices(ctx, target, ctx.operator.operands[0].shape[1])
    column = ctx.op(aten.unsqueeze.default, local, 1)
    found = ctx.op(aten.squeeze.dim, ctx.op(aten.gather.default, log, 1, column), 1)
    counted = ctx.op(aten.ne.Scalar, target, ignored)
    each = _weights(ctx, log, target, counted, weights)
    loss = ctx.op(aten.neg.default, ctx.op(aten.mul.Tensor, found, each))
    loss = zero_unless(ctx, ctx.op(aten.logical_and.default, known, counted), loss)
    if reduction == NONE:
        return [loss, ctx.op(aten.new_zeros.default, log, [])]
    total = ctx.op(aten.sum.default, each)
    loss = ctx.op(aten.sum.default, loss)
    return [ctx.op(aten.div.Tensor, loss, total) if reduction == MEAN else loss, total]


def _weights(
    ctx: LoweringContext, log: fx.Node, target: fx.Node, counted: fx.Node, weights: fx.Node | None
) -> fx.Node:
    """The weight of each row: of its class or 1, and 0 if it is ignored."""
    if weights is None:
        return ctx.cast(counted, value(log).dtype)
    # An ignored target, such as -100, is no index into the weights.
    number = ctx.op(aten.where.ScalarOther, counted, target, 0)
    return zero_unless(ctx, counted, ctx.op(aten.index.Tensor, weights, [number]))


def _rows(operator: Operator) -> list[Loop]:
    """(log-probabilities, targets, weights, reduction, ...): all dims but classes, of a mean."""
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
    loss = ctx.op(getitem, pair, 0)
    if weights is not None:
        total = ctx.op(getitem, pair, 1)
    else:  # of targets alone, so that it does not wait for the loss
        counted = ctx.op(aten.ne.Scalar, target, ignored)
        total = ctx.op(aten.sum.default, counted, dtype=value(log).dtype)
    # Other small sums over rows are in float64, too, and sums of one dtype share a message.
    sums = ctx.all_reduce(*(ctx.cast(node, torch.float64) for node in (loss, total)))
    loss, total = (ctx.cast(node, value(log).dtype) for node in sums)
    return [ctx.op(aten.div.Tensor, loss, total), total]


def _nll_loss_backward(ctx: LoweringContext) -> list[fx.Node]:
    gradient, log, target, weights, reduction, ignored, total = ctx.arguments.args
    local, known = local_indices(ctx, target, ctx.operator.operands[1].shape[1])
    each = ctx.op(aten.neg.default, gradient)
    if reduction == MEAN:
        each = ctx.op(aten.div.Tensor, each, total)
    counted = ctx.op(aten.ne.Scalar, target, ignored)
    counts = _weights(ctx, log, target, counted, weights)
    known = ctx.op(aten.logical_and.default, known, counted)
    each = zero_unless(ctx, known, ctx.op(aten.mul.Tensor, each, counts))
    zeros = ctx.op(aten.new_zeros.default, log, list(value(log).shape))
    local, each = (ctx.op(aten.unsqueeze.default, n, 1) for n in (local, each))
    return [ctx.op(aten.scatter.src, zeros, 1, local, each)]


# -- element by element -------------------------------------------------------------------------

LOSSES = (
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "soft_margin_loss"
)
BACKWARDS = (
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward "
    "soft_margin_loss_backward"
)


def loss_dims(first: int, mean: bool = False) -> Rule:
    """Every dim of the input, which is operand `first`, before the target; others are broadcast.

    The first result of a forward has the dims, or is summed if there is a reduction. The rule is
    for means alone, or for all others.
    """

    def rule(operator: Operator) -> list[Loop]:
        tensors, shape = operator.operands, operator.operands[first].shape
        reduction = operator.argument("reduction")
        is_sum = first == 0 and reduction != NONE
        if (reduction == MEAN) != mean or tensors[first + 1].shape != shape:
            return []  # the lowering's, or input or target is broadcast
        return [
            Loop.over(
                size, [broadcast_access(t, shape, d) for t in tensors], ["sum" if is_sum else d]
            )
            for d, size in enumerate(shape)
        ]

    return rule


def _summed(ctx: LoweringContext) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with a sum instead of the mean."""
    args, kwargs = list(ctx.arguments.args), ctx.arguments.kwargs
    names = [argument.name for argument in ctx.operator.target._schema.arguments]
    if (place := names.index("reduction")) < len(args):
        args[place] = SUM
        return args, kwargs
    return args, {**kwargs, "reduction": SUM}


def _mean_loss(ctx: LoweringContext) -> list[fx.Node]:
    args, kwargs = _summed(ctx)
    total = ctx.op(ctx.operator.target, *args, **kwargs)
    return [ctx.op(aten.div.Scalar, total, ctx.operator.operands[0].numel())]


def _mean_loss_backward(ctx: LoweringContext) -> list[fx.Node]:
    args, kwargs = _summed(ctx)
    args[0] = ctx.op(aten.div.Scalar, args[0], ctx.operator.operands[1].numel())
    return [ctx.op(ctx.operator.target, *args, **kwargs)]


LOWERINGS: dict[str, Any] = {
    "nll_loss": ("nll_loss_forward nll_loss2d_forward", _classes(0, "sum", None), _nll_loss),
    "nll_loss_rows": ("nll_loss_forward nll_loss2d_forward", _rows, _nll_loss_rows),
    "nll_loss_backward": (
        "nll_loss_backward nll_loss2d_backward",
        _classes(1, 1),
        _nll_loss_backward,
    ),
    "mean_loss": (LOSSES, loss_dims(0, mean=True), _mean_loss),
    "mean_loss_backward": (BACKWARDS, loss_dims(1, mean=True), _mean_loss_backward),
}
