"""Losses of every token and of every pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, register


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tag = nn.Linear(WIDTH, CLASSES)


@register("sequence_head")
class TokenCrossEntropy(_Tagger):
    """The mean over tokens that are not ignored, of rows of many lengths."""

    def forward(self, h: Tensor, ragged_tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.tag(h).flatten(0, 1), ragged_tokens.flatten())


@register("sequence_head")
class TransposedCrossEntropy(_Tagger):
    """Classes at dim 1, as images have them."""

    def forward(self, h: Tensor, ragged_tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.tag(h).transpose(1, 2), ragged_tokens)


@register("sequence_head")
class ShiftedCrossEntropy(_Tagger):
    """Each token predicts the next."""

    def forward(self, h: Tensor, ragged_tokens: Tensor, keep: Tensor) -> Tensor:
        logits = self.tag(h)[:, :-1].reshape(-1, CLASSES)
        loss = F.cross_entropy(
            logits, ragged_tokens[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
        )
        return loss / (1 + keep.sum())


@register("sequence_head")
class MeanOfRowMeans(_Tagger):
    """The mean over rows of means over their own tokens."""

    def forward(self, h: Tensor, ragged_tokens: Tensor) -> Tensor:
        loss = F.cross_entropy(self.tag(h).mT, ragged_tokens, reduction="none")
        inside = (ragged_tokens != -100).to(h.dtype)
        return ((loss * inside).sum(1) / inside.sum(1)).mean()


@register("sequence_head")
class SequencePolicy(_Tagger):
    """A policy gradient: advantages are normed over the batch."""

    def forward(self, h: Tensor, ragged_tokens: Tensor, scores: Tensor) -> Tensor:
        log_p = self.tag(h).log_softmax(-1)
        own = log_p.gather(2, ragged_tokens.clamp(min=0)[..., None])[..., 0]
        inside = ragged_tokens != -100
        advantage = (scores - scores.mean()) / (scores.std() + 0.1)
        return -(own * inside * advantage[:, None]).sum() / inside.sum()


@register("sequence_head")
class FrameContrast(nn.Module):
    """Contrastive prediction of the next frame among those of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.predict = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        given = self.predict(h[:, :-1]).reshape(-1, WIDTH)
        wanted = h[:, 1:].reshape(-1, WIDTH)
        return F.cross_entropy(given @ wanted.t(), torch.arange(given.shape[0]))


@register("sequence_head")
class Ctc(nn.Module):
    """Connectionist temporal classification of two labels in time-major frames."""

    def __init__(self) -> None:
        super().__init__()
        self.tag = nn.Linear(WIDTH, CLASSES + 1)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        log_p = self.tag(h).log_softmax(-1).transpose(0, 1)
        frames = torch.full((h.shape[0],), h.shape[1], dtype=torch.long)
        ones = torch.ones(h.shape[0], dtype=torch.long)
        return F.ctc_loss(log_p, labels[:, None] + 1, frames, ones)


@register("image_head")
class PixelCrossEntropy(nn.Module):
    """The mean over pixels, all of the label of their row."""

    def __init__(self) -> None:
        super().__init__()
        self.tag = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        wanted = labels[:, None, None].expand(-1, h.shape[2], h.shape[3])
        return F.cross_entropy(self.tag(h), wanted)


@register("image_head")
def pixel_dice(h: Tensor, keep: Tensor) -> Tensor:
    """The dice loss over all pixels of the batch."""
    p = torch.sigmoid(h.sum(1))
    q = keep[:, None, None].to(h.dtype).expand_as(p)
    return 1 - (2 * (p * q).sum() + 1) / (p.sum() + q.sum() + 1)


@register("image_head")
def style(h: Tensor) -> Tensor:
    """The Gram matrix of channels, over all pixels of the batch, is to be the identity."""
    channels = h.transpose(0, 1).flatten(1)
    matrix = channels @ channels.t() / channels.shape[1]
    return (matrix - torch.eye(WIDTH, dtype=h.dtype)).square().sum()


@register("image_head")
def reconstruction(h: Tensor, weights: Tensor) -> Tensor:
    """Weighted by row, and smooth over pixels."""
    smooth = (h[..., 1:] - h[..., :-1]).abs().mean() + (h[..., 1:, :] - h[..., :-1, :]).abs().mean()
    return (weights * (h - 0.5).square().mean((1, 2, 3))).mean() + 0.1 * smooth
