"""Losses between rows: contrastive, ranking, and metric learning."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import linear, register


def _numbers(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])


def _is_self(h: Tensor) -> Tensor:
    return torch.eye(h.shape[0], dtype=torch.bool)


def _same(labels: Tensor) -> Tensor:
    """Pairs of rows with the same label."""
    return labels[:, None] == labels[None]


@register("rows_head", project=linear(), scale=lambda: nn.Parameter(torch.tensor(0.5)))
def Clip(m, h: Tensor, target: Tensor) -> Tensor:
    """InfoNCE in both directions, with a learnt temperature."""
    a, b = F.normalize(m.project(h), dim=1), F.normalize(target, dim=1)
    logits, own = m.scale.exp() * a @ b.t(), _numbers(h)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


@register("rows_head", divides=2, project=linear())
def SimClrHalves(m, h: Tensor) -> Tensor:
    """Two halves of the batch are two views; a row is no negative of itself."""
    z, n = F.normalize(m.project(h), dim=1), h.shape[0]
    similar = (z @ z.t() / 0.5).masked_fill(_is_self(h), float("-inf"))
    return F.cross_entropy(similar, (_numbers(h) + n // 2) % n)


@register("rows_head")
def batch_hard_triplet(h: Tensor, labels: Tensor) -> Tensor:
    """The farthest row of the same class and the nearest of another."""
    apart, same = torch.cdist(h, h + 1e-3), _same(labels)
    positive = apart.masked_fill(~same, 0.0).amax(1)
    negative = apart.masked_fill(same, 1e3).amin(1)
    return F.softplus(positive - negative + 0.5).mean()


@register("rows_head")
def rolled_triplet(h: Tensor, target: Tensor) -> Tensor:
    """The next row's target is the negative."""
    return F.triplet_margin_loss(h, target, target.roll(1, 0), margin=5.0)


@register("rows_head")
def combined_pairs(h: Tensor, scores: Tensor) -> Tensor:
    """Pairs listed by `torch.combinations`."""
    first, second = torch.combinations(_numbers(h)).unbind(1)
    apart = (h[first] - h[second]).square().sum(1)
    return F.smooth_l1_loss(apart, (scores[first] - scores[second]).abs())


@register("rows_head")
def distances_preserved(h: Tensor, target: Tensor) -> Tensor:
    """Pairwise distances like a teacher's, each divided by their mean."""
    a, b = torch.pdist(h), torch.pdist(target)
    return F.smooth_l1_loss(a / a.mean(), b / b.mean())
