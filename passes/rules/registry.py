"""`loops_of`: the loops of an operator, by a registry of rules."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar._torch import OpOverload
from autopar.core.operators import attention as canonical
from autopar.core.operators.attention_blocks import BLOCKS
from autopar.core.operators.checked import checked
from autopar.core.operators.ctc import ctc_nll, ctc_nll_backward
from autopar.core.operators.experts import expert_mm, expert_outer
from autopar.passes.rules.collectives import COLLECTIVE_RULES
from autopar.passes.rules.loops import Loop, Operator, Rule, fills_dims, overloads
from autopar.passes.rules.lowerings import experts
from autopar.passes.rules.lowerings.losses import BACKWARDS, LOSSES, loss_dims
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS, lowering_loops
from autopar.passes.rules.operators import attention, generic, indexing, structured, views
from autopar.passes.rules.proof.probing import probe_loops

CANONICAL = (canonical.attention, canonical.attention_backward)
KERNELS = overloads(
    "_scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"
)

_RULES_BY_NAMES: Mapping[str | tuple[OpOverload, ...], Rule] = {
    # contractions
    "mm": generic.contraction("mk,kn->mn"),
    "bmm": generic.contraction("bmk,bkn->bmn"),
    "addmm": generic.contraction("mn,mk,kn->mn", added=True),
    "baddbmm": generic.contraction("bmn,bmk,bkn->bmn", added=True),
    "mv": generic.contraction("mk,k->m"),
    "dot": generic.contraction("k,k->"),
    "_grouped_mm": generic.grouped_mm,
    "_scaled_mm": generic.scaled_mm,
    # reductions
    "sum sum.dim_IntList": generic.reduction("sum"),
    "amax max": generic.reduction("max"),
    "mean mean.dim amin min logsumexp prod.dim_int": generic.reduction(None),
    "any.dim all.dim argmax argmin max.dim min.dim": generic.reduction(None),
    "std.correction var.correction var_mean.correction": generic.reduction(None),
    "linalg_vector_norm": generic.reduction(None),
    "histc": generic.histogram,
    # views
    "view _unsafe_view reshape": views.view,
    "permute": views.permute,
    "transpose.int": views.transpose,
    "t": views.t,
    "squeeze squeeze.dim squeeze.dims": views.squeeze,
    "expand": views.expand,
    "repeat": views.repeat,
    "select.int unbind.int": views.removes,
    "unsqueeze stack select_backward": views.inserts,
    "select_scatter": views.select_scatter,
    "slice.Tensor cat slice_scatter slice_backward": generic.along,
    "split.Tensor split_with_sizes": generic.along,
    "constant_pad_nd": generic.pad,
    "flip": lambda op: generic.every_dim_but(op, op.args[1]),
    "roll": generic.roll,
    # along a dim
    "_softmax _log_softmax _safe_softmax cumsum cumprod": generic.along,
    "_softmax_backward_data _log_softmax_backward_data sort sort.stable topk": generic.along,
    "tril triu": lambda op: generic.every_dim_but(op, (-2, -1)),
    "gather": indexing.gather,
    "scatter.src scatter.value scatter_add": indexing.scatter,
    "index.Tensor _unsafe_index.Tensor": indexing.index,
    "index_put _unsafe_index_put": indexing.index_put,
    "index_add": indexing.index_add,
    "index_select": indexing.index_select,
    # norms
    "native_layer_norm _fused_rms_norm native_group_norm": structured.norm(1),
    "native_layer_norm_backward native_group_norm_backward": structured.norm(4, ("sum", "sum")),
    "_fused_rms_norm_backward": structured.norm(3, ("sum",)),
    "_native_batch_norm_legit_functional": structured.batch_norm,
    "_native_batch_norm_legit.no_stats": structured.batch_norm,
    "_native_batch_norm_legit_no_training": structured.batch_norm,
    "native_batch_norm_backward": structured.batch_norm_backward,
    "_weight_norm_interface _weight_norm_interface_backward": structured.weight_norm,
    # losses
    "nll_loss_forward nll_loss2d_forward": structured.nll_loss,
    "nll_loss_backward nll_loss2d_backward": structured.nll_loss_backward,
    LOSSES: loss_dims(0),
    BACKWARDS: loss_dims(1),
    (ctc_nll, ctc_nll_backward): structured.ctc,
    (checked,): generic.pointwise,
    # embedding
    "embedding": indexing.embedding,
    "embedding_dense_backward": indexing.embedding_backward,
    # attention
    CANONICAL: attention.attention,
    (expert_mm,): experts.products,
    (expert_outer,): experts.outer_products,
    (*KERNELS, *BLOCKS): attention.kernel_heads,
    # convolution and pooling
    "convolution": structured.convolution,
    "convolution_backward": structured.convolution_backward,
    "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d": structured.pooling,
    "max_pool2d_with_indices_backward avg_pool2d_backward": structured.pooling,
    "adaptive_max_pool2d adaptive_max_pool2d_backward": structured.pooling,
    "_adaptive_avg_pool2d_backward upsample_nearest2d": structured.pooling,
    "upsample_bilinear2d upsample_bicubic2d upsample_nearest2d_backward": structured.pooling,
    "upsample_bilinear2d_backward upsample_bicubic2d_backward": structured.pooling,
    # a shape and a number
    "full zeros ones empty.memory_format": generic.created,
    "new_zeros new_ones new_full new_empty": generic.created,
}
RULES: Mapping[OpOverload, Rule] = {
    target: rule for names, rule in _RULES_BY_NAMES.items() for target in overloads(names)
}
"""The rules by the operators that they are for, as `overloads` reads them."""

POINTWISE = frozenset(
    overloads(
        "clone detach alias _to_copy lift_fresh_copy zeros_like ones_like full_like empty_like "
        "fill.Scalar fill.Tensor softplus_backward copy floor_divide masked_fill.Scalar "
        "masked_fill.Tensor"
    )
)
"""Pointwise operators that torch does not tag as such."""


def rule_of(target: Any) -> Rule | None:
    """The rule of an operator, pointwise by its tag if it has no own rule; None if unknown."""
    if (rule := RULES.get(target) or COLLECTIVE_RULES.get(target)) is not None:
        return rule
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return None
    return generic.pointwise if torch.Tag.pointwise in tags or target in POINTWISE else None


def loops_of(operator: Operator, also: Container[str] = ()) -> list[Loop]:
    """The loops of an operator, custom lowerings last; probing finds those of an unknown one.

    `also` names optional lowerings that may split it, too.
    """
    if not is_supported(operator.target):
        return probe_loops(operator)
    rule = rule_of(operator.target)
    by_rule = [] if rule is None else rule(operator)
    found = [*by_rule, *lowering_loops(operator, also)]
    return [loop if fills_dims(loop, operator) else replace(loop, even_only=True) for loop in found]


def is_supported(target: Any) -> bool:
    """Whether an operator has a rule or a custom lowering, or takes no tensors."""
    if rule_of(target) is not None or any(
        target in lowering.targets for lowering in CUSTOM_LOWERINGS.values()
    ):
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and not any("Tensor" in str(a.type) for a in schema.arguments)
