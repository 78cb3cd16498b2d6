"""Losses that are means of rows, and losses of the distribution of the batch."""

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
        "median_loss": lambda h, target: (
            _squares(h, target).median() + 0.1 * _squares(h, target).mean()
        ),
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
def worst_group(h: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Group DRO: the largest mean of a class."""
    sums = torch.zeros(CLASSES, dtype=h.dtype).index_add(0, labels, _squares(h, target))
    return (sums / torch.bincount(labels, minlength=CLASSES).clamp(min=1)).max()


def _kernel(a: Tensor, b: Tensor) -> Tensor:
    """Mean of a Gaussian kernel over all pairs."""
    return torch.exp(-(a[:, None] - b[None]).square().sum(-1) / 4).mean()


@register("rows_head")
def mmd(h: Tensor, target: Tensor) -> Tensor:
    """Maximum mean discrepancy."""
    return _kernel(h, h) + _kernel(target, target) - 2 * _kernel(h, target)


@register("rows_head")
def coding_rate(h: Tensor) -> Tensor:
    """The log-determinant of the covariance (MCR2)."""
    matrix = torch.eye(WIDTH, dtype=h.dtype) + h.t() @ h / h.shape[0]
    return -0.5 * torch.logdet(matrix) + 0.05 * h.square().mean()
