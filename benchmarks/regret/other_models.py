"""Two models that nothing was tuned on: `--models benchmarks.regret.other_models`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import Case, images, next_tokens

ENTRIES, TOKENS, ROWS = 1024, 48, 16
WIDTH, HEADS, SHARED = 160, 5, 1  # one head of keys and values


class RotaryBlock(nn.Module):
    """Rotary attention with shared keys and values, and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        each = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * SHARED * each, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (rows, tokens, width) to the same shape."""
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2 * SHARED, -1)).transpose(1, 2).chunk(2, 1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (t.expand(-1, HEADS, -1, -1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features of (rows, heads, tokens, features) by the token's angles."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class RotaryGPT(nn.Module):
    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ENTRIES, WIDTH)
        self.blocks = nn.ModuleList(RotaryBlock() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ENTRIES, bias=False)
        rates = 10000.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
        angles = torch.outer(torch.arange(TOKENS), rates)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predicting `y`, the tokens that follow those of `x`."""
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class MixerBlock(nn.Module):
    """A depthwise convolution beside a skip, then one of 1 x 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.space = nn.Conv2d(channels, channels, 5, padding=2, groups=channels)
        self.channels = nn.Conv2d(channels, channels, 1)
        self.norm1, self.norm2 = (nn.GroupNorm(8, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, channels, height, width) to the same shape."""
        x = x + self.norm1(F.gelu(self.space(x)))
        return self.norm2(F.gelu(self.channels(x)))


class ConvMixer(nn.Module):
    def __init__(self, channels: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, channels, 4, stride=4)
        self.blocks = nn.ModuleList(MixerBlock(channels) for _ in range(layers))
        self.head = nn.Linear(channels, 100)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of classifying images `x` as `y`."""
        h = self.patches(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


CASES = {
    case.name: case
    for case in (
        Case(
            "rotary",
            RotaryGPT,
            partial(next_tokens, rows=ROWS, vocabulary=ENTRIES, tokens=TOKENS),
        ),
        Case("mixer", ConvMixer, partial(images, rows=16)),
    )
}
