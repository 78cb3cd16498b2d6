"""Plan the training of a llama on machines that are not here, without allocating it.

Parameters, gradients and AdamW's state are float32, 16 bytes a parameter, and the computation is
bfloat16 under autocast. --pure-bf16 stores 8 bytes a parameter; small updates are then lost.

autopar plan examples/plan_llama.py --cluster dgx-h100 --nodes 128 --tp 8
autopar plan examples/plan_llama.py --cluster dgx-h100 --nodes 16 -- --size 70b --rows 128
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """Sizes of one model of the family."""

    width: int
    inner: int
    layers: int
    heads: int
    groups: int  # number of key-value heads
    vocabulary: int = 32000


SIZES = {
    "1b": Size(2048, 5504, 24, 16, 16),
    "7b": Size(4096, 11008, 32, 32, 32),
    "8b": Size(4096, 14336, 32, 32, 8, 128256),
    "13b": Size(5120, 13824, 40, 40, 40),
    "34b": Size(8192, 22016, 48, 64, 8),
    "70b": Size(8192, 28672, 80, 64, 8),
    "405b": Size(16384, 53248, 126, 128, 8, 128256),
}


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary position embeddings to (rows, heads, positions, head width)."""
    low, high = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width = size.width // size.heads
        self.share = size.heads // size.groups
        inner = size.groups * self.width
        self.q = nn.Linear(size.width, size.width, bias=False)
        self.k, self.v = (nn.Linear(size.width, inner, bias=False) for _ in range(2))
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        each = (layer(x).unflatten(-1, (-1, self.width)) for layer in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in each)
        q, k = rotate(q, angles), rotate(k, angles)
        if self.share > 1:
            k, v = (t.repeat_interleave(self.share, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention, self.feedforward = Attention(size), FeedForward(size)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.feedforward(self.norm2(x))


class Llama(nn.Module):
    """A decoder that returns the mean loss of predicting the following tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.half = size.width // size.heads // 2
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = self.token(tokens)
        position = torch.arange(tokens.shape[1], device=x.device, dtype=torch.float32)
        exponent = torch.arange(self.half, device=x.device, dtype=torch.float32) / self.half
        angles = position[:, None] * 10000.0**-exponent
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return the model on the meta device, in float32, and a global batch of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--rows", type=int, default=1024, help="rows of the global batch")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    pure = "store parameters and optimizer in bfloat16, without float32 masters"
    parser.add_argument("--pure-bf16", action="store_true", help=pure)
    options = parser.parse_args(sys.argv[1:])
    with torch.device("meta"):
        model = Llama(SIZES[options.size])
        if options.pure_bf16:
            model.to(torch.bfloat16)
        tokens = torch.zeros(options.rows, options.length, dtype=torch.long)
    return model, (tokens, tokens)
