"""Means and sums of rows by label."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, register


@register("rows")
def segment_means(h: Tensor, labels: Tensor) -> Tensor:
    """Rows centred by the mean of their class."""
    sums = h.new_zeros(CLASSES, WIDTH).index_add(0, labels, h)
    counts = torch.bincount(labels, minlength=CLASSES).clamp(min=1)
    return h - 0.5 * (sums / counts[:, None])[labels]


@register("rows")
def prototypes_by_one_hot(h: Tensor, labels: Tensor) -> Tensor:
    """Class prototypes by a product with one-hot labels."""
    hot = F.one_hot(labels, CLASSES).to(h.dtype)
    prototypes = hot.t() @ h / hot.sum(0).clamp(min=1)[:, None]
    return h + torch.softmax(h @ prototypes.t(), -1) @ prototypes


@register("rows")
def scattered_sums(h: Tensor, groups: Tensor) -> Tensor:
    index = groups[:, None].expand_as(h)
    sums = torch.zeros(CLASSES, WIDTH, dtype=h.dtype).scatter_add(0, index, h)
    return h + 0.3 * sums.tanh()[groups]


@register("rows")
def reduced_maxima(h: Tensor, labels: Tensor) -> Tensor:
    """The largest of every class, by `scatter_reduce`."""
    index = labels[:, None].expand_as(h)
    largest = h.new_full((CLASSES, WIDTH), -5.0).scatter_reduce(0, index, h, "amax")
    return h - 0.3 * largest[labels]


@register("rows")
def accumulated(h: Tensor, labels: Tensor) -> Tensor:
    """`index_put` that accumulates into classes."""
    sums = h.new_zeros(CLASSES, WIDTH).index_put((labels,), h, accumulate=True)
    return h + 0.3 * sums[labels].tanh()


@register("rows")
def same_class_attention(h: Tensor, labels: Tensor) -> Tensor:
    same = labels[:, None] == labels[None]
    scores = (h @ h.t() / WIDTH**0.5).masked_fill(~same, -1e9)
    return h + scores.softmax(-1) @ h


@register("rows")
def class_frequencies(h: Tensor, labels: Tensor) -> Tensor:
    """Rows weighted by how often their class occurs."""
    counts = F.one_hot(labels, CLASSES).sum(0)
    return h * (h.shape[0] / counts.clamp(min=1))[labels][:, None].sqrt()


@register("rows")
def weighted_mean_centred(h: Tensor, weights: Tensor) -> Tensor:
    return h - (h * weights[:, None]).sum(0) / weights.sum()


@register("rows")
def attention_pooled(h: Tensor) -> Tensor:
    """One summary of the batch by attention over rows, added to all."""
    weight = h.sum(1).softmax(0)
    return h + weight @ h


@register("rows")
def same_neighbour(h: Tensor, labels: Tensor) -> Tensor:
    """Rows whose label equals that of the row before are marked."""
    same = (labels == labels.roll(1, 0)).to(h.dtype)
    return h * (1 + 0.5 * same[:, None])
