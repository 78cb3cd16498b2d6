"""`loops_of`: the loops of an operator, by a registry of rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar._torch import OpOverload
from autopar.passes.core.collective_ops import (
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from autopar.passes.rules import collectives
from autopar.passes.rules.loops import Loop, Operator, Rule, fills_dims
from autopar.passes.rules.lowerings.mean_loss import BACKWARDS, LOSSES, loss, loss_backward
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS, lowering_loops
from autopar.passes.rules.operators import attention, indexing, structured, views
from autopar.passes.rules.operators.generic import (
    along,
    contraction,
    created,
    every_dim_but,
    grouped_mm,
    histogram,
    pad,
    pointwise,
    reduction,
    roll,
)
from autopar.passes.rules.proof.probing import probe_loops

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
    aten._grouped_mm.default: grouped_mm,
    # reductions
    aten.sum.default: reduction("sum"),
    aten.sum.dim_IntList: reduction("sum"),
    aten.mean.default: reduction(None),
    aten.mean.dim: reduction(None),
    aten.amax.default: reduction("max"),
    aten.amin.default: reduction(None),
    aten.min.default: reduction(None),
    aten.max.default: reduction("max"),
    aten.std.correction: reduction(None, keep=3),
    aten.var.correction: reduction(None, keep=3),
    aten.var_mean.correction: reduction(None, keep=3),
    aten.logsumexp.default: reduction(None),
    aten.prod.dim_int: reduction(None),
    aten.any.dim: reduction(None),
    aten.all.dim: reduction(None),
    aten.argmax.default: reduction(None),
    aten.argmin.default: reduction(None),
    aten.max.dim: reduction(None),
    aten.min.dim: reduction(None),
    aten.histc.default: histogram,
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
    aten.repeat.default: views.repeat,
    aten.select.int: views.select,
    aten.select_backward.default: views.select_backward,
    aten.select_scatter.default: views.select_scatter,
    aten.slice_scatter.default: along(2),
    aten.stack.default: views.stack,
    aten.unbind.int: views.unbind,
    aten.slice.Tensor: along(1),
    aten.slice_backward.default: along(2),
    aten.split.Tensor: along(2),
    aten.split_with_sizes.default: along(2),
    aten.cat.default: along(1),
    aten.constant_pad_nd.default: pad,
    aten.flip.default: lambda op: every_dim_but(op, op.args[1]),
    aten.roll.default: roll,
    # along a dim
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.cumsum.default: along(1),
    aten.cumprod.default: along(1),
    aten.tril.default: lambda op: every_dim_but(op, (-2, -1)),
    aten.triu.default: lambda op: every_dim_but(op, (-2, -1)),
    aten.sort.default: along(1, -1),
    aten.sort.stable: along(2, -1),
    aten.topk.default: along(2, -1),
    aten.gather.default: indexing.gather,
    aten.scatter.src: indexing.scatter,
    aten.scatter.value: indexing.scatter,
    aten.scatter_add.default: indexing.scatter,
    aten.index.Tensor: indexing.index,
    aten.index_put.default: indexing.index_put,
    aten.index_add.default: indexing.index_add,
    aten.index_select.default: indexing.index_select,
    # norms
    aten.native_layer_norm.default: structured.layer_norm,
    aten.native_layer_norm_backward.default: structured.layer_norm_backward,
    aten._fused_rms_norm.default: structured.layer_norm,
    aten._fused_rms_norm_backward.default: structured.rms_norm_backward,
    aten.native_group_norm.default: structured.group_norm,
    aten.native_group_norm_backward.default: structured.group_norm_backward,
    aten._native_batch_norm_legit_functional.default: structured.batch_norm,
    aten._native_batch_norm_legit.no_stats: structured.batch_norm,
    aten._native_batch_norm_legit_no_training.default: structured.batch_norm,
    aten.native_batch_norm_backward.default: structured.batch_norm_backward,
    aten._weight_norm_interface.default: structured.weight_norm,
    aten._weight_norm_interface_backward.default: structured.weight_norm,
    # loss
    aten.nll_loss_forward.default: structured.nll_loss,
    aten.nll_loss_backward.default: structured.nll_loss_backward,
    aten.nll_loss2d_forward.default: structured.nll_loss,
    aten.nll_loss2d_backward.default: structured.nll_loss_backward,
    **dict.fromkeys(LOSSES, loss),
    **dict.fromkeys(BACKWARDS, loss_backward),
    # embedding
    aten.embedding.default: indexing.embedding,
    aten.embedding_dense_backward.default: indexing.embedding_backward,
    # attention
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention.attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention.attention_backward,
    aten._scaled_dot_product_flash_attention.default: attention.heads,
    aten._scaled_dot_product_flash_attention_backward.default: attention.heads,
    aten._scaled_dot_product_efficient_attention.default: attention.heads,
    aten._scaled_dot_product_efficient_attention_backward.default: attention.heads,
    aten._scaled_dot_product_cudnn_attention.default: attention.heads,
    aten._scaled_dot_product_cudnn_attention_backward.default: attention.heads,
    # convolution
    aten.convolution.default: structured.convolution,
    aten.convolution_backward.default: structured.convolution_backward,
    aten.max_pool2d_with_indices.default: structured.pooling,
    aten.avg_pool2d.default: structured.pooling,
    aten._adaptive_avg_pool2d.default: structured.pooling,
    aten.max_pool2d_with_indices_backward.default: structured.pooling,
    aten.avg_pool2d_backward.default: structured.pooling,
    aten._adaptive_avg_pool2d_backward.default: structured.pooling,
    aten.upsample_nearest2d.default: structured.pooling,
    aten.upsample_bilinear2d.default: structured.pooling,
    aten.upsample_bicubic2d.default: structured.pooling,
    aten.upsample_nearest2d_backward.default: structured.pooling,
    aten.upsample_bilinear2d_backward.default: structured.pooling,
    aten.upsample_bicubic2d_backward.default: structured.pooling,
    # a shape and a number
    aten.full.default: created,
    aten.zeros.default: created,
    aten.ones.default: created,
    aten.empty.memory_format: created,
    aten.new_zeros.default: created,
    aten.new_ones.default: created,
    aten.new_full.default: created,
    aten.new_empty.default: created,
}


def rule_of(target: Any) -> Rule | None:
    """The rule of an operator, pointwise by its tag if it has no own rule; None if unknown."""
    if (rule := RULES.get(target) or COLLECTIVE_RULES.get(target)) is not None:
        return rule
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return None
    return pointwise if torch.Tag.pointwise in tags or target in POINTWISE else None


COLLECTIVE_RULES: Mapping[Any, Rule] = {
    start_all_reduce: collectives.all_reduce,
    start_all_gather: collectives.all_gather,
    start_reduce_scatter: collectives.reduce_scatter,
    start_all_to_all: collectives.all_to_all,
}
"""Rules of collectives along other axes."""

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
        aten.fill.Scalar,
        aten.fill.Tensor,
        aten.softplus_backward.default,
        aten.copy.default,
        aten.floor_divide.default,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
    }
)
"""Pointwise operators that torch does not tag as such."""


def loops_of(operator: Operator) -> list[Loop]:
    """The loops of an operator, custom lowerings last; probing finds those of an unknown one."""
    if not is_supported(operator.target):
        return probe_loops(operator)
    rule = rule_of(operator.target)
    by_rule = [] if rule is None else rule(operator)
    found = [*by_rule, *lowering_loops(operator)]
    return [loop if fills_dims(loop, operator) else replace(loop, even_only=True) for loop in found]


def is_supported(target: Any) -> bool:
    """Whether an operator has a rule or a custom lowering, or takes no tensors."""
    if rule_of(target) is not None or any(
        target in lowering.targets for lowering in CUSTOM_LOWERINGS.values()
    ):
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and not any("Tensor" in str(a.type) for a in schema.arguments)
