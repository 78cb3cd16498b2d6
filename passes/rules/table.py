"""The table: which rule an operator has, and whether partial sums pass through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar._torch import OpOverload
from autopar.passes.rules import special, views
from autopar.passes.rules.generic import (
    along,
    contraction,
    every_dim_but,
    pointwise,
    reduction,
    unpadded,
)
from autopar.passes.rules.loops import Loop, Operator, Rule

aten = torch.ops.aten

_softmax = along(1)
_softmax_backward = along(2)

RULES: Mapping[OpOverload, Rule] = {
    # contractions
    aten.mm.default: contraction("mk,kn->mn"),
    aten.bmm.default: contraction("bmk,bkn->bmn"),
    aten.addmm.default: contraction("mn,mk,kn->mn", added=True),
    aten.baddbmm.default: contraction("bmn,bmk,bkn->bmn", added=True),
    aten.mv.default: contraction("mk,k->m"),
    aten.dot.default: contraction("k,k->"),
    # reductions
    aten.sum.default: reduction("sum"),
    aten.sum.dim_IntList: reduction("sum"),
    aten.mean.default: reduction(None),
    aten.mean.dim: reduction(None),
    aten.amax.default: reduction("max"),
    aten.amin.default: reduction(None),
    aten.max.default: reduction("max"),
    aten.var.correction: reduction(None, keep=3),
    aten.var_mean.correction: reduction(None, keep=3),
    aten.logsumexp.default: reduction(None),
    aten.prod.dim_int: reduction(None),
    aten.any.dim: reduction(None),
    aten.all.dim: reduction(None),
    aten.argmax.default: reduction(None),
    aten.max.dim: reduction(None),
    aten.linalg_vector_norm.default: reduction(None, place=2, keep=3),
    # views
    aten.view.default: views.view,
    aten._unsafe_view.default: views.view,
    aten.reshape.default: views.view,
    aten.permute.default: views.permute,
    aten.transpose.int: views.transpose,
    aten.t.default: views.t,
    aten.unsqueeze.default: views.unsqueeze,
    aten.squeeze.default: views.squeeze,
    aten.squeeze.dim: views.squeeze,
    aten.squeeze.dims: views.squeeze,
    aten.expand.default: views.expand,
    aten.select.int: views.select,
    aten.select_backward.default: views.select_backward,
    aten.stack.default: views.stack,
    aten.unbind.int: views.unbind,
    aten.slice.Tensor: along(1),
    aten.slice_backward.default: along(2),
    aten.split.Tensor: along(2),
    aten.split_with_sizes.default: along(2),
    aten.cat.default: along(1),
    aten.constant_pad_nd.default: unpadded,
    aten.flip.default: lambda op: every_dim_but(op, op.args[1]),
    aten.roll.default: lambda op: every_dim_but(op, op.argument(2, "dims", ())),
    # along a dim
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.cumsum.default: along(1),
    aten.cumprod.default: along(1),
    aten.sort.default: along(1, -1),
    aten.sort.stable: along(2, -1),
    aten.topk.default: along(2, -1),
    aten.gather.default: special.gather,
    aten.scatter.src: special.scatter,
    aten.scatter.value: special.scatter,
    aten.scatter_add.default: special.scatter,
    aten.index.Tensor: special.index,
    aten.index_select.default: special.index_select,
    # norms
    aten.native_layer_norm.default: special.layer_norm,
    aten.native_layer_norm_backward.default: special.layer_norm_backward,
    aten.native_group_norm.default: special.group_norm,
    aten._native_batch_norm_legit_functional.default: special.batch_norm_channels,
    aten.native_batch_norm_backward.default: special.batch_norm_channels,
    # loss
    aten.nll_loss_forward.default: special.nll_loss,
    aten.nll_loss_backward.default: special.nll_loss_backward,
    # embedding
    aten.embedding.default: special.embedding,
    aten.embedding_dense_backward.default: special.embedding_backward,
    # attention
    aten._scaled_dot_product_flash_attention_for_cpu.default: special.attention(1, masked=True),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: special.attention_backward,
    # convolution
    aten.convolution.default: special.convolution,
    aten.convolution_backward.default: special.convolution_backward,
    aten.max_pool2d_with_indices.default: special.pooling,
    aten.avg_pool2d.default: special.pooling,
    aten._adaptive_avg_pool2d.default: special.pooling,
}


def rule_of(target: Any) -> Rule | None:
    """The rule of an operator: its own, or that of pointwise operators; None if it has none."""
    if target in RULES:
        return RULES[target]
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target in POINTWISE:
        return pointwise
    return None


POINTWISE = frozenset(
    {
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten._to_copy.default,
        aten.lift_fresh_copy.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
    }
)
"""Pointwise operators that torch does not tag as such."""


def loops_of(operator: Operator) -> list[Loop]:
    """The loops of an operator; none if it has no rule."""
    rule = rule_of(operator.target)
    return [] if rule is None else rule(operator)
