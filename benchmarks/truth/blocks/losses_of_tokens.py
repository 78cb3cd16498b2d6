"""Losses of every token and of every pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, linear, register

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
    """Connectionist temporal classification in time-major frames."""
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
