"""Losses between rows: contrastive, ranking, and metric learning."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, linear, register


def _numbers(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])


def _is_self(h: Tensor) -> Tensor:
    return torch.eye(h.shape[0], dtype=torch.bool)


def _same(labels: Tensor) -> Tensor:
    """Pairs of rows with the same label."""
    return labels[:, None] == labels[None]


def _pairs(scores: Tensor) -> Tensor:
    """Differences of all pairs."""
    return scores[:, None] - scores[None]


@register("rows_head", project=linear())
def InfoNce(m, h: Tensor, target: Tensor) -> Tensor:
    a, b = F.normalize(m.project(h), dim=1), F.normalize(target, dim=1)
    return F.cross_entropy(a @ b.t() / 0.5, _numbers(h))


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


@register("rows_head", project=linear())
def SupervisedContrast(m, h: Tensor, labels: Tensor) -> Tensor:
    """Rows with the same label are positives."""
    z = F.normalize(m.project(h), dim=1)
    log_p = (z @ z.t() / 0.5).masked_fill(_is_self(h), -1e9).log_softmax(-1)
    positive = (_same(labels) & ~_is_self(h)).to(h.dtype)
    return -((log_p * positive).sum(1) / positive.sum(1).clamp(min=1)).mean()


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
def ranked_pairs(h: Tensor, scores: Tensor) -> Tensor:
    """A margin for every pair with different scores."""
    better = _pairs(scores) > 0
    return (F.softplus(1 - _pairs(h.sum(1))) * better).sum() / better.sum()


@register("rows_head")
def upper_pairs(h: Tensor, scores: Tensor) -> Tensor:
    """Pairs by `triu_indices`, through torch's margin ranking loss."""
    first, second = torch.triu_indices(h.shape[0], h.shape[0], offset=1)
    out = h.mean(1)
    sign = torch.sign(scores[first] - scores[second])
    return F.margin_ranking_loss(out[first], out[second], sign, margin=3.0)


@register("rows_head")
def combined_pairs(h: Tensor, scores: Tensor) -> Tensor:
    """Pairs listed by `torch.combinations`."""
    first, second = torch.combinations(_numbers(h)).unbind(1)
    apart = (h[first] - h[second]).square().sum(1)
    return F.smooth_l1_loss(apart, (scores[first] - scores[second]).abs())


@register("rows_head")
def listwise(h: Tensor, scores: Tensor) -> Tensor:
    """ListNet: two softmaxes over the batch."""
    return -(scores.softmax(0) * h.sum(1).log_softmax(0)).sum()


@register("rows_head")
def soft_ranks(h: Tensor, scores: Tensor) -> Tensor:
    """Spearman's correlation of soft ranks."""
    a, b = (torch.sigmoid(2 * _pairs(x)).sum(1) for x in (h.sum(1), scores))
    return 1 - F.cosine_similarity(a - a.mean(), b - b.mean(), dim=0)


@register("rows_head", divides=2)
def siamese_halves(h: Tensor, labels: Tensor) -> Tensor:
    """Rows of the first half beside those of the second: alike if their labels are."""
    (first, second), (a, b) = h.chunk(2), labels.chunk(2)
    return F.cosine_embedding_loss(first, second, torch.where(a == b, 1.0, -1.0), margin=0.2)


@register("rows_head", queue=lambda: torch.randn(14, WIDTH))
def NearestInQueue(m, h: Tensor, target: Tensor) -> Tensor:
    """The nearest neighbour in a queue is the positive (NNCLR)."""
    z, queue = F.normalize(h, dim=1), F.normalize(m.queue.clone(), dim=1)
    nearest = queue[(z.detach() @ queue.t()).argmax(1)]
    loss = F.cross_entropy(nearest @ F.normalize(target + h, dim=1).t() * 3, _numbers(h))
    m.queue.copy_(torch.cat([h.detach(), m.queue])[:14])
    return loss


@register("rows_head")
def distances_preserved(h: Tensor, target: Tensor) -> Tensor:
    """Pairwise distances like a teacher's, each divided by their mean."""
    a, b = torch.pdist(h), torch.pdist(target)
    return F.smooth_l1_loss(a / a.mean(), b / b.mean())


@register("rows_head")
def margin_from_centres(h: Tensor, labels: Tensor) -> Tensor:
    """Prototypical networks: the class mean of the batch nearest to each row."""
    hot = F.one_hot(labels, CLASSES).to(h.dtype)
    centres = hot.t() @ h / hot.sum(0).clamp(min=1)[:, None]
    return F.cross_entropy(-torch.cdist(h, centres + 1e-2).square(), labels)


@register("rows_head")
def koleo(h: Tensor, target: Tensor) -> Tensor:
    """Push away the nearest neighbour in the batch (DINOv2)."""
    z = F.normalize(h, dim=1)
    nearest = (z @ z.t()).fill_diagonal_(-2).detach().argmax(1)
    return F.mse_loss(h, target) - 0.1 * (z - z[nearest] + 1e-3).norm(dim=1).log().mean()
