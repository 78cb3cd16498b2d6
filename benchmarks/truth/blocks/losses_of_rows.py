"""Losses that are means of rows, with all kinds of weights and denominators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, define, define_all, linear, register

CLASSIFIER = {"classify": linear(WIDTH, CLASSES)}


def _squares(h: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each row."""
    return (h - target).square().mean(1)


def _entropies(m, h: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row."""
    return F.cross_entropy(m.classify(h), labels, reduction="none")


define_all(
    "rows_head",
    {
        "mse": lambda h, target: F.mse_loss(h, target),
        "weighted_mse": lambda h, target, weights: _squares(h, target) @ weights / weights.sum(),
        "smooth_l1": lambda h, target: F.smooth_l1_loss(h, target, beta=0.7),
    },
    plain=True,
)
define_all(
    "rows_head",
    {
        "root_mse": lambda h, target: F.mse_loss(h, target).sqrt(),
        "log_of_mean": lambda h, target: (
            torch.log1p(_squares(h, target).mean()) + h.abs().max() * 0.1
        ),
        "sorted_regression": lambda h, scores: F.mse_loss(
            h.mean(1).sort().values, scores.sort().values
        ),
        "variance_penalised": lambda h, target: (
            _squares(h, target).mean() + 0.5 * _squares(h, target).var()
        ),
        "soft_worst_case": lambda h, target: torch.logsumexp(_squares(h, target), 0),
        "median_loss": lambda h, target: (
            _squares(h, target).median() + 0.1 * _squares(h, target).mean()
        ),
        "trimmed_mean": lambda h, target: _squares(h, target).sort().values[:-2].mean(),
        "picked_by_mask": lambda h, target, keep: _squares(h, target)[keep].mean(),
    },
)
for _name, _forward in {
    "CrossEntropy": lambda m, h, labels: F.cross_entropy(m.classify(h), labels),
    "RaggedCrossEntropy": lambda m, h, ragged: F.cross_entropy(m.classify(h), ragged),
    "MaskedMean": lambda m, h, labels, keep: (
        _entropies(m, h, labels) @ keep.to(h.dtype) / keep.sum().clamp(min=1)
    ),
}.items():
    define("rows_head", _name, _forward, CLASSIFIER, plain=True)


@register("rows_head", **CLASSIFIER)
def SummedCrossEntropy(m, h: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.classify(h), labels, reduction="sum", label_smoothing=0.1)


@register("rows_head", **CLASSIFIER, class_weight=lambda: torch.tensor([0.2, 1.0, 3.0]))
def ClassWeightedCrossEntropy(m, h: Tensor, labels: Tensor) -> Tensor:
    """The denominator is the sum of the weights of the labels."""
    return F.cross_entropy(m.classify(h), labels, weight=m.class_weight)


@register("rows_head", out=linear(WIDTH, 1))
def BinaryCrossEntropy(m, h: Tensor, keep: Tensor, weights: Tensor) -> Tensor:
    logits = m.out(h)[:, 0]
    return F.binary_cross_entropy_with_logits(logits, keep.to(h.dtype), weight=weights)


@register("rows_head", **CLASSIFIER)
def HardestHalf(m, h: Tensor, labels: Tensor) -> Tensor:
    return _entropies(m, h, labels).topk(h.shape[0] // 2).values.mean()


@register("rows_head")
def correlation(h: Tensor, scores: Tensor) -> Tensor:
    """One minus Pearson's correlation over the batch."""
    a, b = h.sum(1) - h.sum(1).mean(), scores - scores.mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 0.1)


@register("rows_head")
def distribution_matched(h: Tensor, labels: Tensor) -> Tensor:
    """The divergence of the mean prediction from the class frequencies of the batch."""
    mean = h[:, :CLASSES].softmax(-1).mean(0)
    frequencies = F.one_hot(labels, CLASSES).to(h.dtype).mean(0)
    return F.kl_div(mean.log(), frequencies, reduction="sum") + 0.01 * h.square().mean()


@register("rows_head")
def cox(h: Tensor, scores: Tensor, keep: Tensor) -> Tensor:
    """Cox's partial likelihood: a cumulative log-sum over the batch sorted by time."""
    order = scores.argsort(descending=True)
    risk, event = h.mean(1)[order], keep[order].to(h.dtype)
    return -((risk - risk.logcumsumexp(0)) * event).sum() / event.sum()


@register("rows_head")
def worst_group(h: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Group DRO: the largest mean of a class."""
    sums = torch.zeros(CLASSES, dtype=h.dtype).index_add(0, labels, _squares(h, target))
    return (sums / torch.bincount(labels, minlength=CLASSES).clamp(min=1)).max()


@register("rows_head")
def temporal_difference(h: Tensor, scores: Tensor, keep: Tensor) -> Tensor:
    """Rows are steps of one episode: returns by a loop from the last to the first."""
    value, future, losses = h.mean(1), h.new_zeros(()), []
    for t in range(h.shape[0] - 1, -1, -1):
        future = scores[t] + 0.9 * future * keep[t]
        losses.append((value[t] - future).square())
    return torch.stack(losses).mean()


@register("rows_head", log_variance=lambda: torch.nn.Parameter(torch.zeros(2)))
def UncertaintyWeighted(m, h: Tensor, target: Tensor, scores: Tensor) -> Tensor:
    """Two losses weighted by learnt variances, with a term of parameters alone."""
    losses = torch.stack([F.mse_loss(h, target), F.l1_loss(h.mean(1), scores)])
    return (torch.exp(-m.log_variance) * losses + m.log_variance).sum()


@register("rows_head", code=linear(WIDTH, 2 * WIDTH), decode=linear())
def Variational(m, h: Tensor, target: Tensor, noise: Tensor) -> Tensor:
    """A reconstruction and a divergence; noise is an input."""
    mean, log_var = m.code(h).chunk(2, dim=1)
    out = m.decode(mean + noise * torch.exp(0.5 * log_var))
    divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
    return F.mse_loss(out, target, reduction="sum") / h.shape[0] + 0.1 * divergence
