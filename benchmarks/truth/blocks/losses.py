"""Losses of rows, of their distribution, between rows, and of every token and pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, define_all, linear, register

CLASSIFIER = {"classify": linear(WIDTH, CLASSES)}


def _squares(h: Tensor, target: Tensor) -> Tensor:
    """Mean squared error of each row."""
    return (h - target).square().mean(1)


def _entropies(m, h: Tensor, labels: Tensor) -> Tensor:
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
define_all(
    "rows_head",
    {
        "CrossEntropy": lambda m, h, labels: F.cross_entropy(m.classify(h), labels),
        "RaggedCrossEntropy": lambda m, h, ragged: F.cross_entropy(m.classify(h), ragged),
        "MaskedMean": lambda m, h, labels, keep: (
            _entropies(m, h, labels) @ keep.to(h.dtype) / keep.sum().clamp(min=1)
        ),
    },
    parts=CLASSIFIER,
    plain=True,
)


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
    return _kernel(h, h) + _kernel(target, target) - 2 * _kernel(h, target)


@register("rows_head")
def coding_rate(h: Tensor) -> Tensor:
    matrix = torch.eye(WIDTH, dtype=h.dtype) + h.t() @ h / h.shape[0]
    return -0.5 * torch.logdet(matrix) + 0.05 * h.square().mean()


def _numbers(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])


def _is_self(h: Tensor) -> Tensor:
    return torch.eye(h.shape[0], dtype=torch.bool)


def _same(labels: Tensor) -> Tensor:
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
    first, second = torch.combinations(_numbers(h)).unbind(1)
    apart = (h[first] - h[second]).square().sum(1)
    return F.smooth_l1_loss(apart, (scores[first] - scores[second]).abs())


@register("rows_head")
def distances_preserved(h: Tensor, target: Tensor) -> Tensor:
    """Pairwise distances like a teacher's, each divided by their mean."""
    a, b = torch.pdist(h), torch.pdist(target)
    return F.smooth_l1_loss(a / a.mean(), b / b.mean())


TAGGER = {"tag": linear(WIDTH, CLASSES)}


@register("sequence_head", plain=True, **TAGGER)
def TokenCrossEntropy(m, h: Tensor, ragged_tokens: Tensor) -> Tensor:
    """The mean over tokens that are not ignored, in rows of many lengths."""
    return F.cross_entropy(m.tag(h).flatten(0, 1), ragged_tokens.flatten())


@register("sequence_head", **TAGGER)
def ShiftedCrossEntropy(m, h: Tensor, ragged_tokens: Tensor, keep: Tensor) -> Tensor:
    """Each token predicts the next; the denominator is an input."""
    logits = m.tag(h)[:, :-1].reshape(-1, CLASSES)
    loss = F.cross_entropy(logits, ragged_tokens[:, 1:].reshape(-1), reduction="sum")
    return loss / (1 + keep.sum())


@register("sequence_head", plain=True, **TAGGER)
def MeanOfRowMeans(m, h: Tensor, ragged_tokens: Tensor) -> Tensor:
    """The mean over rows of means over their own tokens."""
    loss = F.cross_entropy(m.tag(h).mT, ragged_tokens, reduction="none")
    inside = (ragged_tokens != -100).to(h.dtype)
    return ((loss * inside).sum(1) / inside.sum(1)).mean()


@register("sequence_head", tag=linear(WIDTH, CLASSES + 1))
def Ctc(m, h: Tensor, labels: Tensor) -> Tensor:
    log_p = m.tag(h).log_softmax(-1).transpose(0, 1)
    frames = torch.full((h.shape[0],), h.shape[1], dtype=torch.long)
    return F.ctc_loss(log_p, labels[:, None] + 1, frames, torch.ones_like(frames))


@register("image_head", plain=True, tag=lambda: nn.Conv2d(WIDTH, CLASSES, 1))
def PixelCrossEntropy(m, h: Tensor, labels: Tensor) -> Tensor:
    """The mean over pixels, all with the label of their row."""
    return F.cross_entropy(m.tag(h), labels[:, None, None].expand(-1, *h.shape[2:]))


@register("image_head", plain=True)
def reconstruction(h: Tensor, weights: Tensor) -> Tensor:
    """Weighted by row, and smooth over pixels."""
    smooth = (h[..., 1:] - h[..., :-1]).abs().mean() + (h[..., 1:, :] - h[..., :-1, :]).abs().mean()
    return (weights * (h - 0.5).square().mean((1, 2, 3))).mean() + 0.1 * smooth


@register("image_head")
def style(h: Tensor) -> Tensor:
    """The Gram matrix of channels, over all pixels of the batch, towards the identity."""
    channels = h.transpose(0, 1).flatten(1)
    matrix = channels @ channels.t() / channels.shape[1]
    return (matrix - torch.eye(WIDTH, dtype=h.dtype)).square().sum()
