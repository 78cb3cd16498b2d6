"""Losses between rows: contrastive, ranking, and of distributions over the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, register


class _Projected(nn.Module):
    """Rows and a second view of them, projected."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)


@register("rows_head")
class InfoNce(_Projected):
    """Each row's own target among those of the batch."""

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        a, b = F.normalize(self.project(h), dim=1), F.normalize(target, dim=1)
        return F.cross_entropy(a @ b.t() / 0.5, torch.arange(h.shape[0]))


@register("rows_head")
class Clip(_Projected):
    """InfoNCE in both directions, with a learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        a, b = F.normalize(self.project(h), dim=1), F.normalize(target, dim=1)
        logits = self.scale.exp() * a @ b.t()
        own = torch.arange(logits.shape[0])
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2


@register("rows_head", divides=2)
class SimClrHalves(_Projected):
    """Two halves of the batch are two views; a row is no negative of itself."""

    def forward(self, h: Tensor) -> Tensor:
        z = F.normalize(self.project(h), dim=1)
        n = z.shape[0]
        similar = (z @ z.t() / 0.5).masked_fill(torch.eye(n, dtype=torch.bool), float("-inf"))
        return F.cross_entropy(similar, (torch.arange(n) + n // 2) % n)


@register("rows_head")
class Siglip(_Projected):
    """A sigmoid for every pair."""

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        logits = self.project(h) @ target.t()
        sign = 2 * torch.eye(h.shape[0], dtype=h.dtype) - 1
        return -F.logsigmoid(sign * logits).sum() / h.shape[0]


@register("rows_head")
class SupervisedContrast(_Projected):
    """Rows with the same label are positives."""

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        z = F.normalize(self.project(h), dim=1)
        itself = torch.eye(h.shape[0], dtype=torch.bool)
        log_p = (z @ z.t() / 0.5).masked_fill(itself, -1e9).log_softmax(-1)
        same = ((labels[:, None] == labels[None]) & ~itself).to(h.dtype)
        return -((log_p * same).sum(1) / same.sum(1).clamp(min=1)).mean()


@register("rows_head")
def batch_hard_triplet(h: Tensor, labels: Tensor) -> Tensor:
    """The farthest row of the same class and the nearest of another."""
    apart = torch.cdist(h, h + 1e-3)
    same = labels[:, None] == labels[None]
    positive = apart.masked_fill(~same, 0.0).amax(1)
    negative = apart.masked_fill(same, 1e3).amin(1)
    return F.softplus(positive - negative + 0.5).mean()


@register("rows_head")
def rolled_triplet(h: Tensor, target: Tensor) -> Tensor:
    """The next row's target is the negative."""
    return F.triplet_margin_loss(h, target, target.roll(1, 0), margin=5.0)


@register("rows_head")
def ranked_pairs(h: Tensor, scores: Tensor) -> Tensor:
    """A margin for every pair whose scores differ."""
    out = h.sum(1)
    better = scores[:, None] > scores[None]
    loss = F.softplus(1 - (out[:, None] - out[None]))
    return (loss * better).sum() / better.sum()


@register("rows_head")
def upper_pairs(h: Tensor, scores: Tensor) -> Tensor:
    """Pairs by `triu_indices`, through torch's margin ranking loss."""
    first, second = torch.triu_indices(h.shape[0], h.shape[0], offset=1)
    out = h.mean(1)
    sign = torch.sign(scores[first] - scores[second])
    return F.margin_ranking_loss(out[first], out[second], sign, margin=3.0)


@register("rows_head")
def listwise(h: Tensor, scores: Tensor) -> Tensor:
    """ListNet: two softmaxes over the batch."""
    return -(scores.softmax(0) * h.sum(1).log_softmax(0)).sum()


@register("rows_head")
def mmd(h: Tensor, target: Tensor) -> Tensor:
    """Maximum mean discrepancy under a Gaussian kernel."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / 4).mean()

    return kernel(h, h) + kernel(target, target) - 2 * kernel(h, target)


@register("rows_head")
def coral(h: Tensor, target: Tensor) -> Tensor:
    """The distance of two covariances."""
    return (torch.cov(h.t()) - torch.cov(target.t())).square().mean()


@register("rows_head")
def vicreg(h: Tensor, target: Tensor) -> Tensor:
    """Invariance, variance and covariance."""
    spread = F.relu(2 - torch.sqrt(h.var(0) + 1e-4)).mean()
    centred = h - h.mean(0)
    covariance = centred.t() @ centred / (h.shape[0] - 1)
    off = covariance.square().sum() - covariance.diagonal().square().sum()
    return F.mse_loss(h, target) + spread + off / WIDTH


@register("rows_head")
def barlow_twins(h: Tensor, target: Tensor) -> Tensor:
    """The cross-correlation of two views is to be the identity."""
    a = (h - h.mean(0)) / (h.std(0) + 0.1)
    b = (target - target.mean(0)) / (target.std(0) + 0.1)
    cross = a.t() @ b / h.shape[0]
    return (cross - torch.eye(WIDTH, dtype=h.dtype)).square().sum()


@register("rows_head")
def similarity_preserved(h: Tensor, target: Tensor) -> Tensor:
    """Pairwise similarities as a teacher has them."""
    return F.mse_loss(F.normalize(h @ h.t()), F.normalize(target @ target.t()))


@register("rows_head")
def distances_preserved(h: Tensor, target: Tensor) -> Tensor:
    """Pairwise distances, each divided by their mean."""
    given, wanted = torch.pdist(h), torch.pdist(target)
    return F.smooth_l1_loss(given / given.mean(), wanted / wanted.mean())


@register("rows_head")
def hsic(h: Tensor, target: Tensor) -> Tensor:
    """Independence of two sets of features, by centred Gram matrices."""
    n = h.shape[0]
    centre = torch.eye(n, dtype=h.dtype) - 1 / n
    return torch.trace(h @ h.t() @ centre @ target @ target.t() @ centre) / (n - 1) ** 2 + (
        0.1 * h.square().mean()
    )


@register("rows_head")
def uniform_on_sphere(h: Tensor, target: Tensor) -> Tensor:
    """Alignment and uniformity."""
    a, b = F.normalize(h, dim=1), F.normalize(target, dim=1)
    uniformity = torch.pdist(a).square().mul(-2).exp().mean().log()
    return (a - b).square().sum(1).mean() + uniformity


@register("rows_head")
def margin_from_centres(h: Tensor, labels: Tensor) -> Tensor:
    """Prototypical networks: the class mean of the batch nearest to each row."""
    hot = F.one_hot(labels, 3).to(h.dtype)
    centres = hot.t() @ h / hot.sum(0).clamp(min=1)[:, None]
    return F.cross_entropy(-torch.cdist(h, centres + 1e-2).square(), labels)


@register("rows_head")
def koleo(h: Tensor, target: Tensor) -> Tensor:
    """The nearest neighbour in the batch is to be far (DINOv2)."""
    z = F.normalize(h, dim=1)
    nearest = (z @ z.t()).fill_diagonal_(-2).detach().argmax(1)
    return F.mse_loss(h, target) - 0.1 * (z - z[nearest] + 1e-3).norm(dim=1).log().mean()
