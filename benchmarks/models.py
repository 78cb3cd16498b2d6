"""Models of the contenders, each with its data; every forward returns the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar

VOCABULARY = 4096
WIDTH = 256
HEADS = 8
LAYERS = 4
SEQ = 128  # tokens in a row
BATCHES = 4  # distinct global batches, used in turn, so that the loss falls and errors show


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]  # the caller seeds
    batch: Callable[[int], tuple[Tensor, Tensor]]  # global batch of a step, alike on every rank
    # submodules that fully_shard wraps and compiles one by one
    blocks: Callable[[Any], list[nn.Module]] = lambda model: list(model.blocks)
    learning_rate: float = 1e-3  # of AdamW
    batch_statistics: bool = False  # whether the loss depends on the division of rows (BatchNorm)
    experts: Mapping[str, autopar.Shard] = field(default_factory=dict)  # placements along ep
    search: tuple[str, ...] = ("pp", "tp")  # axes that the chosen plan may have
    # further strategies for a number of ranks, by name, that suit this model alone
    strategies: Callable[[int], Mapping[str, autopar.Strategy]] = lambda ranks: {}


Norm = Callable[[int], nn.Module]  # makes a norm from the number of channels


class DecoderBlock(nn.Module):
    """Pre-norm causal block with one linear layer for queries, keys and values."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, tokens, width) to the same shape."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))

    def feed(self, x: Tensor) -> Tensor:
        """Map (rows, tokens, width) to the same shape, each token by itself."""
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """A decoder of 4.2 M parameters, with the embedding tied to the output layer."""

    def __init__(
        self,
        layers: int = LAYERS,
        vocabulary: int = VOCABULARY,
        *,
        tied: bool = True,
        width: int = WIDTH,
        heads: int = HEADS,
        length: int = SEQ,
        block: type[DecoderBlock] = DecoderBlock,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        if tied:
            self.head.weight = self.token.weight

    def logits(self, x: Tensor) -> Tensor:
        """Map tokens (rows, tokens) to scores (rows, tokens, vocabulary)."""
        h = self.token(x) + self.position.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predicting tokens `y`."""
        return token_loss(self.logits(x), y)


class Logits(nn.Module):
    """The logits of a GPT, for a loss in the loop."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.logits(x)


def token_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of predicting tokens `y` by logits (rows, tokens, vocabulary)."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Encoder(nn.Module):
    """BERT-like: torch's own post-norm layers, untied output layer: 5.3 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of restoring tokens `y` from the corrupted `x`."""
        h = self.norm(self.token(x) + self.position.weight[: x.shape[1]])
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut, a norm after each."""

    def __init__(self, inner: int, outer: int, stride: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm1, self.norm2 = norm(outer), norm(outer)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inner != outer:
            conv = nn.Conv2d(inner, outer, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, norm(outer))

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, inner, height, width) to (rows, outer, height / stride, width / stride)."""
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ConvNet(nn.Module):
    """ResNet-like, for images of 32 x 32: 2.8 M parameters."""

    def __init__(self, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        widths = (32, 32, 64, 128, 256)
        stem = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.stem = nn.Sequential(stem, norm(widths[0]), nn.ReLU())
        self.blocks = nn.ModuleList()
        for stage, (inner, outer) in enumerate(pairwise(widths)):
            self.blocks.append(ResidualBlock(inner, outer, stride=2 if stage else 1, norm=norm))
            self.blocks.append(ResidualBlock(outer, outer, stride=1, norm=norm))
        self.head = nn.Linear(widths[-1], 100)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of classifying images `x` as `y`."""
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h.mean((2, 3))), y)


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step % BATCHES)


def next_tokens(
    step: int, rows: int = 16, vocabulary: int = VOCABULARY, tokens: int = SEQ
) -> tuple[Tensor, Tensor]:
    """Return rows of random tokens, and the tokens that follow each."""
    text = torch.randint(vocabulary, (rows, tokens + 1), generator=generator(step))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def masked_tokens(step: int) -> tuple[Tensor, Tensor]:
    """Return 16 rows of random tokens with 15 % of them masked, and the whole rows."""
    drawn = generator(step)
    text = torch.randint(1, VOCABULARY, (16, SEQ), generator=drawn)
    return text.masked_fill(torch.rand(text.shape, generator=drawn) < 0.15, 0), text


def images(step: int, rows: int = 32) -> tuple[Tensor, Tensor]:
    drawn = generator(step)
    x = torch.randn(rows, 3, 32, 32, generator=drawn)
    return x, torch.randint(100, (rows,), generator=drawn)


CASES = {
    case.name: case
    for case in (
        Case("gpt", GPT, next_tokens),
        Case("encoder", Encoder, masked_tokens),
        # at 1e-3, rounding in BatchNorm and Adam's first steps changes losses by 3 % in 15 steps
        Case("conv", ConvNet, images, learning_rate=3e-5, batch_statistics=True),
    )
}
