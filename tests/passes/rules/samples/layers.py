"""Random calls of norms, losses, random numbers, attention and convolution."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from autopar.core.operators import attention, attention_blocks
from autopar.core.operators.checked import checked
from autopar.core.operators.ctc import ctc_nll, ctc_nll_backward
from autopar.core.operators.experts import expert_mm, expert_outer
from autopar.passes.rules.loops import overloads
from autopar.passes.rules.lowerings.losses import BACKWARDS, LOSSES
from tests.passes.rules.samples.draw import Draw, sample

aten = torch.ops.aten

# -- experts -----------------------------------------------------------------------------------


@sample(expert_mm)
def products_of_experts(d: Draw) -> tuple[Any, ...]:
    rows, experts, k, n = d.size(), d.size(), d.size(), d.size()
    return (d.rand(rows, k), d.rand(experts, k, n), d.randint(experts + 1, rows))


@sample(expert_outer)
def outer_products_of_experts(d: Draw) -> tuple[Any, ...]:
    rows, experts, k, n = d.size(), d.size(), d.size(), d.size()
    return (d.rand(rows, k), d.rand(rows, n), d.randint(experts + 1, rows), experts)


# -- checks, connectionist temporal classification ----------------------------------------------


@sample(checked)
def never_fails(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes()
    fails = torch.zeros(shape if d.flag() else [], dtype=torch.bool)
    return (d.rand(*shape), fails, "")


@sample(ctc_nll)
def classification_in_time(d: Draw) -> tuple[Any, ...]:
    rows, labels, classes = d.size(), d.size(), d.size() + 1
    time = 2 * labels + 1  # enough for any repetition
    targets = d.randint(classes - 1, rows, labels) + 1
    mask = d.randint(2, rows, labels) == 1 if d.flag() else None
    lengths = d.randint(labels + 1, rows) if mask is None else mask.sum(1)
    scores = d.rand(time, rows, classes).log_softmax(-1)
    return (scores, targets, mask, torch.full((rows,), time), lengths, 0, d.flag())


@sample(ctc_nll_backward)
def classification_in_time_backward(d: Draw) -> tuple[Any, ...]:
    scores, *call = classification_in_time(d)
    return (d.rand(scores.shape[1]), scores, *call)


# -- norms, losses, embedding ------------------------------------------------------------------


@sample(aten.native_layer_norm.default)
def layer_norm(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(2, 4)
    weight = (d.rand(shape[-1]), d.rand(shape[-1])) if d.flag() else (None, None)
    return (d.rand(*shape), [shape[-1]], *weight, 1e-5)


@sample(aten.native_layer_norm_backward.default)
def layer_norm_backward(d: Draw) -> tuple[Any, ...]:
    source, normal, weight, bias, eps = layer_norm(d)
    _, mean, rstd = aten.native_layer_norm.default(source, normal, weight, bias, eps)
    mask = [True, weight is not None, bias is not None]
    return (d.rand(*source.shape), source, normal, mean, rstd, weight, bias, mask)


@sample(aten._fused_rms_norm.default)
def rms_norm(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(2, 4)
    return (d.rand(*shape), [shape[-1]], d.rand(shape[-1]) if d.flag() else None, 1e-5)


@sample(aten.native_group_norm_backward.default)
def group_norm_backward(d: Draw) -> tuple[Any, ...]:
    source, weight, _, *sizes, groups, _ = group_norm(d)
    mean, rstd = (d.rand(source.shape[0], groups) for _ in range(2))
    mask = [True, True, True]
    return (d.rand(*source.shape), source, mean, rstd, weight, *sizes, groups, mask)


@sample(aten.native_group_norm.default)
def group_norm(d: Draw) -> tuple[Any, ...]:
    rows, groups, each, width = d.size(), 2, 3, d.size()
    channels = groups * each
    weights = (d.rand(channels), d.rand(channels))
    return (d.rand(rows, channels, width), *weights, rows, channels, width, groups, 1e-5)


@sample(aten._native_batch_norm_legit_functional.default)
def batch_norm(d: Draw) -> tuple[Any, ...]:
    rows, channels, width = d.size() + 1, d.size(), d.size()
    stats = [d.rand(channels) for _ in range(4)]
    return (d.rand(rows, channels, width, 2), *stats, d.flag(), 0.1, 1e-5)


@sample(aten._native_batch_norm_legit.no_stats)
def batch_norm_without_buffers(d: Draw) -> tuple[Any, ...]:
    source, weight, bias, *_ = batch_norm(d)
    return (source, weight, bias, True, 0.1, 1e-5)


@sample(aten._native_batch_norm_legit_no_training.default)
def batch_norm_in_evaluation(d: Draw) -> tuple[Any, ...]:
    *given, _, momentum, eps = batch_norm(d)
    return (*given, momentum, eps)


@sample(aten.native_batch_norm_backward.default)
def batch_norm_backward(d: Draw) -> tuple[Any, ...]:
    source, weight, _, mean, var, trains, _, eps = batch_norm(d)
    moments = torch.var_mean(source, [0, 2, 3], correction=0)
    saved = (moments[1], (moments[0] + eps).rsqrt())
    mask = [True, True, True]
    return (d.rand(*source.shape), source, weight, mean, var, *saved, trains, eps, mask)


SCALED = (aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)


@sample(aten._weight_norm_interface.default)
def weight_norm(d: Draw) -> tuple[Any, ...]:
    rows = d.size()
    return (d.rand(rows, d.size()), d.rand(rows, 1), 0)


@sample(aten._weight_norm_interface_backward.default)
def weight_norm_backward(d: Draw) -> tuple[Any, ...]:
    v, g, dim = weight_norm(d)
    norms = aten._weight_norm_interface.default(v, g, dim)[1]
    return (d.rand(*v.shape), v, g, norms, dim)


ENTROPIES = (
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.binary_cross_entropy_backward.default,
)


@sample(*(target for target in overloads(LOSSES) if target not in ENTROPIES))
def mean_loss(d: Draw) -> tuple[Any, ...]:
    shape = d.sizes(1, 3)
    values = (d.rand(*shape) / 2, d.rand(*shape) / 2)
    return (*values, d.data.draw(st.sampled_from([0, 1, 2])))


@sample(aten.binary_cross_entropy.default)
def binary_cross_entropy(d: Draw) -> tuple[Any, ...]:
    x, y, reduction = mean_loss(d)
    return (x, y, d.rand(*x.shape) if d.flag() else None, reduction)


@sample(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(d: Draw) -> tuple[Any, ...]:
    *values, reduction = binary_cross_entropy(d)
    return (*values, d.rand(values[0].shape[-1]) if d.flag() else None, reduction)


@sample(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(d: Draw) -> tuple[Any, ...]:
    *values, reduction = binary_cross_entropy(d)
    gradient = d.rand(*values[0].shape) if reduction == 0 else d.rand()
    return (gradient, *values, reduction)


@sample(*SCALED)
def scaled_loss_backward(d: Draw) -> tuple[Any, ...]:
    return (*mean_loss_backward(d), 0.2)


@sample(*(target for target in overloads(BACKWARDS) if target not in (*SCALED, *ENTROPIES)))
def mean_loss_backward(d: Draw) -> tuple[Any, ...]:
    *values, reduction = mean_loss(d)
    gradient = d.rand(*values[0].shape) if reduction == 0 else d.rand()
    return (gradient, *values, reduction)


@sample(aten.nll_loss_forward.default)
def nll_loss(d: Draw) -> tuple[Any, ...]:
    rows, classes = d.size(), d.size()
    reduction = d.data.draw(st.sampled_from([0, 1, 2]))
    weights, ignored = (d.rand(classes) if d.flag() else None), (0 if d.flag() else -100)
    targets = d.randint(classes, rows)
    targets[0] = classes - 1  # of a mean something has to count
    return (d.rand(rows, classes), targets, weights, reduction, ignored if classes > 1 else -100)


@sample(aten.nll_loss2d_forward.default)
def nll_loss_of_images(d: Draw) -> tuple[Any, ...]:
    source, targets, *rest = nll_loss(d)
    high, wide = d.size(), d.size()
    picture = targets[:, None, None].repeat(1, high, wide)
    return (d.rand(*source.shape, high, wide), picture, *rest)


@sample(aten.nll_loss2d_backward.default)
def nll_loss_of_images_backward(d: Draw) -> tuple[Any, ...]:
    return _nll_loss_backward(d, *nll_loss_of_images(d))


@sample(aten.nll_loss_backward.default)
def nll_loss_backward(d: Draw) -> tuple[Any, ...]:
    return _nll_loss_backward(d, *nll_loss(d))


def _nll_loss_backward(d: Draw, *forward: Any) -> tuple[Any, ...]:
    source, targets, weights, reduction, ignored = forward
    gradient = d.rand(*targets.shape) if reduction == 0 else d.rand()
    total = torch.tensor(3.5, dtype=d.dtype)
    return (gradient, source, targets, weights, reduction, ignored, total)


@sample(aten.embedding.default)
def embedding(d: Draw) -> tuple[Any, ...]:
    entries = d.size()
    return (d.rand(entries, d.size()), d.randint(entries, *d.sizes(1, 3)))


@sample(aten.embedding_dense_backward.default)
def embedding_backward(d: Draw) -> tuple[Any, ...]:
    entries, shape = d.size(), d.sizes(1, 3)
    padding, by_frequency = -1 if d.flag() else entries - 1, d.flag()
    return (d.rand(*shape, d.size()), d.randint(entries, *shape), entries, padding, by_frequency)


# -- random numbers ----------------------------------------------------------------------------


@sample(aten.bernoulli.p, aten.uniform.default, aten.exponential.default)
def draw_like(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 0.3)


@sample(aten.normal_functional.default, aten.rand_like.default, aten.randn_like.default)
def draw_like_plain(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()),)


@sample(aten.randint_like.default)
def draw_integers_like(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 7)


@sample(aten.randint_like.low_dtype)
def draw_integers_from_like(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 3, 7)


@sample(aten.rand.default, aten.randn.default)
def draw_of_shape(d: Draw) -> tuple[Any, ...]:
    return (d.sizes(),)


@sample(aten.randint.default)
def draw_integers(d: Draw) -> tuple[Any, ...]:
    return (7, d.sizes())


@sample(aten.randint.low)
def draw_integers_from(d: Draw) -> tuple[Any, ...]:
    return (3, 7, d.sizes())


@sample(aten.normal.float_float)
def draw_normal(d: Draw) -> tuple[Any, ...]:
    return (1.0, 2.0, d.sizes())


@sample(aten.bernoulli.default, aten.poisson.default)
def draw_each(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()) / 2,)


@sample(aten.native_dropout.default)
def dropout(d: Draw) -> tuple[Any, ...]:
    return (d.rand(*d.sizes()), 0.3, True)


# -- attention, convolution, pooling -----------------------------------------------------------


def _qkv(d: Draw) -> tuple[Any, ...]:
    batch, heads, queries, width = d.size(), d.size(), d.size(), 4
    keys = d.size()
    q = d.rand(batch, heads, queries, width)
    k, v = (d.rand(batch, heads, keys, width) for _ in range(2))
    mask = None
    if d.flag():
        mask = d.rand(*(1 if d.flag() else size for size in (batch, heads)), queries, keys)
    return q, k, v, mask, mask is None and d.flag()


FLASH = aten._scaled_dot_product_flash_attention_for_cpu


@sample(FLASH.default)
def flash_attention(d: Draw) -> tuple[Any, ...]:
    q, k, v, mask, causal = _qkv(d)
    return (q, k, v, 0.0, causal, {} if mask is None else {"attn_mask": mask})


@sample(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_attention_backward(d: Draw) -> tuple[Any, ...]:
    q, k, v, _, causal = _qkv(d)
    out, statistics = FLASH.default(q, k, v, 0.0, causal)
    return (d.rand(*out.shape), q, k, v, out, statistics, 0.0, causal)


@sample(attention.attention)
def canonical_attention(d: Draw) -> tuple[Any, ...]:
    q, k, v, mask, causal = _qkv(d)
    if d.flag():  # several query heads share a key head
        q = d.rand(q.shape[0], 2 * k.shape[1], *q.shape[2:])
        mask = None
    dropout = 0.3 if d.flag() else 0.0
    return (q, k, v, mask, dropout, causal and mask is None, None, [])


@sample(attention.attention_backward)
def canonical_attention_backward(d: Draw) -> tuple[Any, ...]:
    q, k, v, mask, *call = canonical_attention(d)
    results = attention.attention(q, k, v, mask, *call)
    wanted = mask is not None and d.flag()
    return (d.rand(*results[0].shape), q, k, v, mask, *results, wanted, *call)


@sample(attention_blocks.attention_block)
def attention_block(d: Draw) -> tuple[Any, ...]:
    q, k, v, *_ = _qkv(d)
    if d.flag():
        q = d.rand(q.shape[0], 2 * k.shape[1], *q.shape[2:])
    parts = ("whole", "early", "late")
    part = parts[d.size() % 3] if q.shape[2] > 1 < k.shape[2] else "whole"
    return (q, k, v, part == "whole" and d.flag(), part)


@sample(attention_blocks.attention_block_backward)
def attention_block_backward(d: Draw) -> tuple[Any, ...]:
    q, k, v, *call = attention_block(d)
    out, logsumexp, _ = attention.attention(q, k, v, None, 0.0, call[0])
    return (d.rand(*out.shape), q, k, v, out, logsumexp, *call)


@sample(aten.convolution.default)
def convolution(d: Draw) -> tuple[Any, ...]:
    rows, into, out = d.size(), d.size(), d.size()
    transposed, groups = d.flag(), d.size()
    weight = (into * groups, out) if transposed else (out * groups, into)
    bias = d.rand(out * groups) if d.flag() else None
    rest = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    return (d.rand(rows, into * groups, 5, 5), d.rand(*weight, 3, 3), bias, *rest)


@sample(aten.convolution_backward.default)
def convolution_backward(d: Draw) -> tuple[Any, ...]:
    source, weight, bias, *rest = convolution(d)
    out = aten.convolution.default(source, weight, bias, *rest)
    sizes, mask = [out.shape[1]], [True, True, bias is not None]
    return (d.rand(*out.shape), source, weight, sizes, *rest, mask)


@sample(aten.max_pool2d_with_indices.default, aten.avg_pool2d.default)
def pooling(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 6, 6), [2, 2])


@sample(aten.max_pool2d_with_indices_backward.default)
def max_pooling_backward(d: Draw) -> tuple[Any, ...]:
    source, size = pooling(d)
    out, places = aten.max_pool2d_with_indices.default(source, size)
    return (d.rand(*out.shape), source, size, [2, 2], [0, 0], [1, 1], False, places)


@sample(aten.adaptive_max_pool2d.default)
def adaptive_max_pooling(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 6, 5), [2, 3])


@sample(aten.adaptive_max_pool2d_backward.default)
def adaptive_max_pooling_backward(d: Draw) -> tuple[Any, ...]:
    source, size = adaptive_max_pooling(d)
    out, places = aten.adaptive_max_pool2d.default(source, size)
    return (d.rand(*out.shape), source, places)


@sample(aten.avg_pool2d_backward.default)
def mean_pooling_backward(d: Draw) -> tuple[Any, ...]:
    source, size = pooling(d)
    return (d.rand(*source.shape[:2], 3, 3), source, size, [2, 2], [0, 0], False, True, None)


@sample(aten._adaptive_avg_pool2d_backward.default)
def adaptive_pooling_backward(d: Draw) -> tuple[Any, ...]:
    source, size = adaptive_pooling(d)
    return (d.rand(*source.shape[:2], *size), source)


@sample(aten.upsample_nearest2d.default)
def upsampled_nearest(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 3, 2), [5, 4])


@sample(aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default)
def upsampled(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 3, 2), [5, 4], False)


@sample(aten.upsample_nearest2d_backward.default)
def upsampled_nearest_backward(d: Draw) -> tuple[Any, ...]:
    rows, channels = d.size(), d.size()
    return (d.rand(rows, channels, 5, 4), [5, 4], [rows, channels, 3, 2])


@sample(aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default)
def upsampled_backward(d: Draw) -> tuple[Any, ...]:
    return (*upsampled_nearest_backward(d), False)


@sample(aten._adaptive_avg_pool2d.default)
def adaptive_pooling(d: Draw) -> tuple[Any, ...]:
    return (d.rand(d.size(), d.size(), 6, 6), [2, 3])
