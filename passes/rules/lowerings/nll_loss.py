"""Own lowerings of the negative log-likelihood: its classes sharded, or what a mean is over.

With those of log-softmax a cross-entropy never gathers the logits, of which each rank has a part of
the vocabulary: what is sent are numbers a row.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar.passes.rules.loops import DimAccess, Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value
from autopar.passes.rules.lowerings.embedding import places, zero_unless
from autopar.passes.rules.operators.structured import targets

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


def _nll_loss(site: LoweringContext) -> list[fx.Node]:
    log, target, weights, reduction, ignored = site.arguments.args
    place, known = places(site, target, site.operator.operands[0].shape[1])
    column = site.op(aten.unsqueeze.default, place, 1)
    found = site.op(aten.squeeze.dim, site.op(aten.gather.default, log, 1, column), 1)
    counted = site.op(aten.ne.Scalar, target, ignored)
    each = _weights(site, target, counted, weights, value(log).dtype)
    loss = site.op(aten.neg.default, site.op(aten.mul.Tensor, found, each))
    loss = zero_unless(site, site.op(aten.logical_and.default, known, counted), loss)
    if reduction == NONE:
        return [loss, site.op(aten.new_zeros.default, log, [])]
    total = site.op(aten.sum.default, each)
    loss = site.op(aten.sum.default, loss)
    return [site.op(aten.div.Tensor, loss, total) if reduction == MEAN else loss, total]


def _weights(
    site: LoweringContext,
    target: fx.Node,
    counted: fx.Node,
    weights: fx.Node | None,
    dtype: torch.dtype,
) -> fx.Node:
    """What each row counts: its class's weight or 1, nothing if it is ignored."""
    if weights is None:
        return site.cast(counted, dtype)
    number = site.op(aten.where.ScalarOther, counted, target, 0)
    return zero_unless(site, counted, site.op(aten.index.Tensor, weights, [number]))


def _rows(operator: Operator) -> list[Loop]:
    """As `_classes`: all else of a mean, which is over how many of all targets count."""
    source, *others = operator.operands
    rest = (None,) * (len(others) - 1)
    return [
        Loop(source.shape[dim], (DimAccess(dim), DimAccess(place), *rest), (None, None))
        for dim, place in targets(source)
        if operator.args[3] == MEAN
    ]


def _nll_loss_rows(site: LoweringContext) -> list[fx.Node]:
    """The sum over all rows, over their total weight: both in one message."""
    log, target, weights, _, ignored = site.arguments.args
    pair = site.op(site.operator.target, log, target, weights, SUM, ignored)
    sums = [site.op(getitem, pair, 0), _total(site, pair)]
    sums = site.all_reduce(*(site.cast(node, torch.float64) for node in sums))
    loss, total = (site.cast(node, value(log).dtype) for node in sums)
    return [site.op(aten.div.Tensor, loss, total), total]


def _total(site: LoweringContext, pair: fx.Node) -> fx.Node:
    """The weight of a rank's rows: of the targets alone, so that no schedule waits for the loss."""
    log, target, weights, _, ignored = site.arguments.args
    if weights is not None:
        return site.op(getitem, pair, 1)
    counted = site.op(aten.ne.Scalar, target, ignored)
    return site.op(aten.sum.default, counted, dtype=value(log).dtype)


def _classes_backward(operator: Operator) -> list[Loop]:
    """(gradient, log-probabilities, targets, weights, reduction, ignored, total): classes."""
    _, source, *others = operator.operands
    if source.dim() < 2:
        return []
    rest = (None,) * len(others)
    return [
        Loop(source.shape[1], (None, DimAccess(1), *rest), (DimAccess(1),), interleavable=False)
    ]


def _nll_loss_backward(site: LoweringContext) -> list[fx.Node]:
    gradient, log, target, weights, reduction, ignored, total = site.arguments.args
    place, known = places(site, target, site.operator.operands[1].shape[1])
    each = site.op(aten.neg.default, gradient)
    if reduction == MEAN:
        each = site.op(aten.div.Tensor, each, total)
    counted = site.op(aten.ne.Scalar, target, ignored)
    counts = _weights(site, target, counted, weights, value(log).dtype)
    known = site.op(aten.logical_and.default, known, counted)
    each = zero_unless(site, known, site.op(aten.mul.Tensor, each, counts))
    zeros = site.op(aten.new_zeros.default, log, list(value(log).shape))
    place, each = (site.op(aten.unsqueeze.default, n, 1) for n in (place, each))
    return [site.op(aten.scatter.src, zeros, 1, place, each)]


LOWERINGS: dict[str, Any] = {
    "nll_loss": (LOSSES, _classes, _nll_loss),
    "nll_loss_rows": (LOSSES, _rows, _nll_loss_rows),
    "nll_loss_backward": (BACKWARD, _classes_backward, _nll_loss_backward),
}
"""Targets, loops and lowering, by name."""
