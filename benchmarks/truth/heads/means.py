"""Losses: means with all kinds of weights and denominators."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, register


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(WIDTH, CLASSES)


@register("rows_head")
class CrossEntropy(_Classifier):
    """The mean cross-entropy."""

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classify(h), labels)


@register("rows_head")
class SummedCrossEntropy(_Classifier):
    """The sum over the batch, with smoothed labels."""

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classify(h), labels, reduction="sum", label_smoothing=0.1)


@register("rows_head")
class RaggedCrossEntropy(_Classifier):
    """Some labels are ignored: the divisor depends on the batch."""

    def forward(self, h: Tensor, ragged: Tensor) -> Tensor:
        return F.cross_entropy(self.classify(h), ragged, ignore_index=-100)


@register("rows_head")
class ClassWeightedCrossEntropy(_Classifier):
    """Classes have weights: the divisor is the sum of those of the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_weight", torch.tensor([0.2, 1.0, 3.0]))

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classify(h), labels, weight=self.class_weight)


@register("rows_head")
class NllOfRows(_Classifier):
    """The negative log likelihood of each row, then a mean by hand."""

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        picked = self.classify(h).log_softmax(-1).gather(1, labels[:, None])
        return -picked.sum() / h.shape[0]


@register("rows_head")
class BinaryCrossEntropy(nn.Module):
    """Logits with a weight for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, h: Tensor, keep: Tensor, weights: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(
            self.out(h)[:, 0], keep.to(h.dtype), weight=weights
        )


@register("rows_head")
class Focal(_Classifier):
    """The focal loss, divided by its own weights."""

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.classify(h), labels, reduction="none")
        weight = (1 - torch.exp(-loss)).square()
        return (weight * loss).sum() / weight.sum()


@register("rows_head")
class HardestHalf(_Classifier):
    """The mean over the rows with the largest losses."""

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.classify(h), labels, reduction="none")
        return loss.topk(h.shape[0] // 2).values.mean()


@register("rows_head")
class MaskedMean(_Classifier):
    """The mean over rows that a mask keeps."""

    def forward(self, h: Tensor, labels: Tensor, keep: Tensor) -> Tensor:
        loss = F.cross_entropy(self.classify(h), labels, reduction="none")
        return (loss * keep).sum() / keep.sum().clamp(min=1)


@register("rows_head")
def weighted_mse(h: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    return ((h - target).square().mean(1) * weights).sum() / weights.sum()


@register("rows_head")
def mse(h: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(h, target)


@register("rows_head")
def root_mse(h: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(h, target).sqrt()


@register("rows_head")
def smooth_l1(h: Tensor, target: Tensor) -> Tensor:
    return F.smooth_l1_loss(h, target, beta=0.7)


@register("rows_head")
def log_of_the_mean(h: Tensor, target: Tensor) -> Tensor:
    """A function of a mean that is not linear."""
    return torch.log1p((h - target).square().mean()) + h.abs().max() * 0.1


@register("rows_head")
def correlation(h: Tensor, scores: Tensor) -> Tensor:
    """One minus Pearson's correlation over the batch."""
    given, wanted = h.sum(1) - h.sum(1).mean(), scores - scores.mean()
    return 1 - (given * wanted).sum() / (given.norm() * wanted.norm() + 0.1)


@register("rows_head")
def concordance(h: Tensor, scores: Tensor) -> Tensor:
    """Lin's concordance: means, variances and a covariance of the batch."""
    out = h.mean(1)
    covariance = ((out - out.mean()) * (scores - scores.mean())).mean()
    return 1 - 2 * covariance / (out.var() + scores.var() + (out.mean() - scores.mean()) ** 2)


@register("rows_head")
def explained_variance(h: Tensor, target: Tensor) -> Tensor:
    residual = (target - h).square().sum(0)
    return (residual / (target - target.mean(0)).square().sum(0).clamp(min=0.1)).mean()


@register("rows_head")
def dice(h: Tensor, keep: Tensor) -> Tensor:
    """The dice loss over the batch."""
    p, q = torch.sigmoid(h.sum(1)), keep.to(h.dtype)
    return 1 - (2 * (p * q).sum() + 1) / (p.sum() + q.sum() + 1)


@register("rows_head")
def distribution_matched(h: Tensor, labels: Tensor) -> Tensor:
    """The divergence of the mean prediction from the classes of the batch."""
    mean = h[:, :CLASSES].softmax(-1).mean(0)
    wanted = F.one_hot(labels, CLASSES).to(h.dtype).mean(0)
    return F.kl_div(mean.log(), wanted, reduction="sum") + 0.01 * h.square().mean()


@register("rows_head")
def cox(h: Tensor, scores: Tensor, keep: Tensor) -> Tensor:
    """Cox's partial likelihood: sorted by time, a cumulative log-sum over the batch."""
    order = scores.argsort(descending=True)
    risk, event = h.mean(1)[order], keep[order].to(h.dtype)
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()


@register("rows_head")
def sorted_regression(h: Tensor, scores: Tensor) -> Tensor:
    """The distance of two sorted samples, as a Wasserstein distance in one dimension."""
    return (h.mean(1).sort().values - scores.sort().values).square().mean()


@register("rows_head")
def variance_penalised(h: Tensor, target: Tensor) -> Tensor:
    """The mean of the rows' losses and their variance (REx)."""
    loss = (h - target).square().mean(1)
    return loss.mean() + 0.5 * loss.var()


@register("rows_head")
def soft_worst_case(h: Tensor, target: Tensor) -> Tensor:
    """A log-sum-exp over rows: the hardest count most."""
    loss = (h - target).square().mean(1)
    return torch.logsumexp(loss, 0)


@register("rows_head")
def quantile_loss(h: Tensor, target: Tensor) -> Tensor:
    """The median of the rows' losses and their mean."""
    loss = (h - target).square().mean(1)
    return loss.median() + 0.1 * loss.mean()


@register("rows_head")
def by_position(h: Tensor, target: Tensor) -> Tensor:
    """Rows weighted by their place in the batch."""
    weight = torch.linspace(0.1, 1.0, h.shape[0], dtype=h.dtype)
    return ((h - target).square().mean(1) * weight).sum()
