"""Blocks that treat every row alone, as most of most models does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.truth.registry import WIDTH, register


@register("rows")
class FeedForward(nn.Module):
    """Two layers with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, h: Tensor) -> Tensor:
        return h + self.net(h)


@register("rows")
class Gated(nn.Module):
    """A gated linear unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        value, gate = self.gate(h).chunk(2, dim=-1)
        return h + value * torch.sigmoid(gate)


@register("rows")
class RootMeanSquareNorm(nn.Module):
    """RMS norm by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 0.1) * self.weight


@register("rows")
class Twice(nn.Module):
    """The same layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(self.linear(h).tanh()).tanh()


@register("rows")
class Bilinear(nn.Module):
    """A bilinear form of the row with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.3 * self.form(h, h)


@register("rows")
class Conditioned(nn.Module):
    """Scaled and shifted by the embedding of a label."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2 * WIDTH)

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        scale, shift = self.table(labels).chunk(2, dim=1)
        return h * (1 + 0.2 * scale) + shift


@register("rows")
class Checkpointed(nn.Module):
    """A part that the backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h + checkpoint(self.net, h, use_reentrant=False)


@register("rows")
class FeaturesAsTokens(nn.Module):
    """Attention over the features of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        tokens = self.lift(h[..., None])
        return h + self.attention(tokens, tokens, tokens)[0].mean(-1)


@register("rows")
class Maxout(nn.Module):
    """The largest of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h).view(-1, 2, WIDTH).amax(1)


@register("rows")
def softmax_of_features(h: Tensor) -> Tensor:
    return h + WIDTH * h.softmax(-1)


@register("rows")
def sorted_features(h: Tensor) -> Tensor:
    return h + 0.5 * h.sort(-1).values


@register("rows")
def summed_features(h: Tensor) -> Tensor:
    return h + 0.3 * h.cumsum(-1)


@register("rows")
def normalised_rows(h: Tensor) -> Tensor:
    return F.normalize(h, dim=-1) * WIDTH**0.5


@register("rows")
def rotated(h: Tensor) -> Tensor:
    """Pairs of features rotated by an angle each, as rotary embeddings do."""
    angle = torch.arange(WIDTH // 2, dtype=h.dtype)
    even, odd = h[:, 0::2], h[:, 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, dim=-1).flatten(1)


@register("rows")
def weighted_rows(h: Tensor, weights: Tensor) -> Tensor:
    """An input of a number for every row."""
    return h * weights[:, None]


@register("rows")
def shifted_by_target(h: Tensor, target: Tensor) -> Tensor:
    return torch.addcmul(h, target, torch.sigmoid(h), value=0.5)
