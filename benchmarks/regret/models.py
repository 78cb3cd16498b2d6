"""Small and diverse models whose plans are compared.

`--models` takes a module with `CASES`, such as this one. The loss of every model is independent of
the division of rows over ranks and micro-batches, so the conv net has GroupNorm.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from benchmarks.models import GPT, Case, ConvNet, DecoderBlock, generator, images, next_tokens

TOKENS, ROWS = 64, 16  # of a global batch of text
WIDTH, HEADS = 128, 4
ENTRIES = 512  # of a small vocabulary
FIELDS, IDS, FACTORS = 16, 4096, 32  # of the recommender
EXPERTS = 4


class EncoderDecoder(nn.Module):
    """Torch's own layers; the decoder starts with the first token of the target `y`."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        sizes = (WIDTH, HEADS, 4 * WIDTH)
        self.source, self.target = nn.Embedding(ENTRIES, WIDTH), nn.Embedding(ENTRIES, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(*sizes, **options) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(*sizes, **options) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ENTRIES)
        self.register_buffer("later", torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of translating tokens `x` into `y`, one longer."""
        memory = self.source(x) + self.position
        for layer in self.encoder:
            memory = layer(memory)
        h = self.target(y[:, :-1]) + self.position
        for layer in self.decoder:
            h = layer(h, memory, tgt_mask=self.later)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y[:, 1:].flatten())


class Experts(nn.Module):
    """Feed-forwards, two weighted ones for each token; all run on every token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, tokens, width) to the same shape."""
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        combine = torch.einsum("rtk,rtke->rte", weights, F.one_hot(chosen, EXPERTS).to(x.dtype))
        hidden = F.gelu(torch.einsum("rtd,edh->rteh", x, self.up))
        return torch.einsum("rteh,ehd,rte->rtd", hidden, self.down, combine)


class ExpertBlock(DecoderBlock):
    """Attention and experts, normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.experts = Experts()

    def feed(self, x: Tensor) -> Tensor:
        return self.experts(x)


class Recommender(nn.Module):
    """A table of factors for each field of a row, their products, and a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(IDS, FACTORS) for _ in range(FIELDS))
        sizes = (FIELDS * FACTORS, 256, 64)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.last = nn.Linear(sizes[-1], 1)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predicting clicks `y` from ids `x` of (rows, fields)."""
        found = torch.stack([table(x[:, i]) for i, table in enumerate(self.tables)], 1)
        products = (found.sum(1).square() - found.square().sum(1)).sum(-1) / 2
        h = found.flatten(1)
        for layer in self.layers:
            h = F.relu(layer(h))
        return F.binary_cross_entropy_with_logits(self.last(h).squeeze(-1) + products, y)


def translations(step: int) -> tuple[Tensor, Tensor]:
    drawn = generator(step)
    x = torch.randint(ENTRIES, (ROWS, TOKENS), generator=drawn)
    return x, torch.randint(ENTRIES, (ROWS, TOKENS + 1), generator=drawn)


def clicks(step: int, rows: int = 512) -> tuple[Tensor, Tensor]:
    drawn = generator(step)
    x = torch.randint(IDS, (rows, FIELDS), generator=drawn)
    return x, torch.randint(2, (rows,), generator=drawn).float()


def gpt(name: str, layers: int, width: int, entries: int, **options: Any) -> Case:
    """Return a decoder of some size, with `options` of `Case` and of `GPT`."""
    experts = options.pop("experts", {})
    build = partial(GPT, layers, entries, width=width, heads=HEADS, **options)
    batch = partial(next_tokens, rows=ROWS, vocabulary=entries, tokens=TOKENS)
    return Case(name, build, batch, experts=experts)


EXPERT_SHARDS = {"*.experts.up": autopar.Shard(0), "*.experts.down": autopar.Shard(0)}
CASES = {
    case.name: case
    for case in (
        gpt("deep", 8, 96, ENTRIES),
        gpt("wide", 2, 256, ENTRIES),
        gpt("vocabulary", 2, WIDTH, 8192, tied=False),
        Case("encdec", EncoderDecoder, translations, lambda m: [*m.encoder, *m.decoder]),
        Case("conv", partial(ConvNet, partial(nn.GroupNorm, 8)), partial(images, rows=16)),
        gpt("moe", 4, WIDTH, ENTRIES, tied=False, block=ExpertBlock, experts=EXPERT_SHARDS),
        Case("recommender", Recommender, clicks, lambda m: [*m.tables, *m.layers]),
    )
}
"""1 to 3 million parameters each."""
