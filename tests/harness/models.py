"""Small models with one property each that a parallel plan could get wrong, and their reference.

Everybody compares against `reference`: the plain model trained on one process. All models work in
float32 and float64 and take milliseconds a step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harness.model_parts import (
    CLASSES,
    IGNORED,
    IMAGE,
    SEQ,
    VOCAB,
    WIDTH,
    CrossAttention,
    Embedding,
    SelfAttention,
    feed_forward,
    generator,
    merge_heads,
    ragged_mask,
    token_ids,
    token_loss,
)

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments and keyword arguments of one call of a model."""

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    """A model, its batches, where the loss is in its output, and the dim of rows if stated."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Callable[[Any], Tensor]
    rows: int | None = None


MODELS: dict[str, Case] = {}


def case(
    name: str,
    batch: Callable[[int, int], Batch],
    loss: Callable[[Any], Tensor] = lambda out: out,
    rows: int | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module class, whose initial parameters are the same at every `make`."""

    def register(module: type[nn.Module], **options: Any) -> type[nn.Module]:
        def make() -> nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return module(**options)

        MODELS[name] = Case(name, make, batch, loss, rows)
        return module

    return register


# -- gpt and dropout ---------------------------------------------------------------------------


def next_token_batch(rows: int, seed: int) -> Batch:
    ids = token_ids(rows, generator(seed), SEQ + 1)
    return (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), {}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = SelfAttention(dropout)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = feed_forward(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), causal=True)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Pre-norm, fused QKV, the head tied to the token embedding."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.token.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.embedding(ids))
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x)), targets)


case("gpt", next_token_batch)(GPT)
case("dropout", next_token_batch)(GPT, dropout=0.1)


# -- uneven ------------------------------------------------------------------------------------

HEADS, NARROW, HIDDEN, ENTRIES = 5, 30, 151, 97


class UnevenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(NARROW)
        self.qkv = nn.Linear(NARROW, 3 * NARROW)
        self.out = nn.Linear(NARROW, NARROW)
        self.norm2 = nn.LayerNorm(NARROW)
        self.up = nn.Linear(NARROW, HIDDEN)
        self.down = nn.Linear(HIDDEN, NARROW)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(merge_heads(y))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def uneven_batch(rows: int, seed: int) -> Batch:
    ids = torch.randint(ENTRIES, (rows, SEQ + 1), generator=generator(seed))
    return (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), {}


@case("uneven", uneven_batch)
class UnevenGPT(nn.Module):
    """Five heads, a vocabulary of 97 and a feed-forward of 151, which hardly an axis divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ENTRIES, NARROW)
        self.blocks = nn.ModuleList(UnevenBlock() for _ in range(2))
        self.norm = nn.LayerNorm(NARROW)
        self.head = nn.Linear(NARROW, ENTRIES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x)), targets)


# -- encoder -----------------------------------------------------------------------------------


def masked_batch(rows: int, seed: int) -> Batch:
    gen = generator(seed)
    labels = torch.randint(CLASSES, (rows,), generator=gen)
    return (token_ids(rows, gen),), {"attention_mask": ragged_mask(rows, gen), "labels": labels}


class EncoderLayer(nn.Module):
    """Post-norm, as BERT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = SelfAttention()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.mlp = feed_forward()
        self.norm2 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))


@case("encoder", masked_batch, loss=lambda out: out["loss"])
class Encoder(nn.Module):
    """BERT-like: padding masked, the first token pooled and classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.embedding(ids))
        for layer in self.layers:
            x = layer(x, attention_mask[:, None, None, :])
        logits = self.classifier(torch.tanh(self.pooler(x[:, 0])))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


# -- conv --------------------------------------------------------------------------------------


def image_batch(rows: int, seed: int) -> Batch:
    gen = generator(seed)
    images = torch.randn(rows, *IMAGE, generator=gen)
    return (images, torch.randint(CLASSES, (rows,), generator=gen)), {}


@case("conv", image_batch)
class ConvNet(nn.Module):
    """BatchNorm: what one rank computes depends on which rows it sees."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(IMAGE[0], channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.stem(images))), 2)
        x = F.relu(x + self.norm2(self.conv(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


# -- encdec ------------------------------------------------------------------------------------


def translation_batch(rows: int, seed: int) -> Batch:
    gen = generator(seed)
    source, source_mask = token_ids(rows, gen), ragged_mask(rows, gen)
    target = token_ids(rows, gen, SEQ + 1)
    labels = target[:, 1:].masked_fill(~ragged_mask(rows, gen), IGNORED)
    args = (source, target[:, :-1].contiguous())
    return args, {"source_mask": source_mask, "labels": labels}


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.cross = CrossAttention()
        self.norm3 = nn.LayerNorm(WIDTH)
        self.mlp = feed_forward()

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), causal=True)
        x = x + self.cross(self.norm2(x), memory, mask)
        return x + self.mlp(self.norm3(x))


@case("encdec", translation_batch, loss=lambda out: out[0])
class EncoderDecoder(nn.Module):
    """Cross-attention; the loss is a mean over a number of tokens that differs between rows."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Embedding()
        self.target = Embedding()
        self.encoder = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(
        self, source: Tensor, target: Tensor, source_mask: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        mask = source_mask[:, None, None, :]
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory, mask)
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory, mask)
        logits = self.head(x)
        return token_loss(logits, labels), logits


# -- moe ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Top-2 of softmax routing, every expert run on every token and combined by weight."""

    def __init__(self, experts: int = 4, top: int = 2) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / (2 * WIDTH) ** 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(self.top, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        one_hot = F.one_hot(chosen, self.experts).to(x.dtype)
        combine = torch.einsum("bsk,bske->bse", weights, one_hot)
        hidden = F.gelu(torch.einsum("bsd,edh->bseh", x, self.up))
        y = torch.einsum("bseh,ehd,bse->bsd", hidden, self.down, combine)
        return y, self.balance(probabilities, one_hot[:, :, 0])

    def balance(self, probabilities: Tensor, first: Tensor) -> Tensor:
        """Switch Transformer's auxiliary loss: a product of two means over the batch."""
        fraction, mean = first.mean((0, 1)), probabilities.mean((0, 1))
        return self.experts * (fraction * mean).sum()


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = SelfAttention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.experts = Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x), causal=True)
        y, balance = self.experts(self.norm2(x))
        return x + y, balance


@case("moe", next_token_batch, loss=lambda out: out["loss"], rows=0)
class MixtureOfExperts(nn.Module):
    """A language model whose auxiliary loss is not a mean of per-row losses."""

    def __init__(self, aux_weight: float = 0.01) -> None:
        super().__init__()
        self.aux_weight = aux_weight
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(ExpertBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embedding(ids)
        auxiliary = x.new_zeros(())
        for block in self.blocks:
            x, balance = block(x)
            auxiliary = auxiliary + balance
        main = token_loss(self.head(x), targets)
        return {"loss": main + self.aux_weight * auxiliary, "main": main, "aux": auxiliary}


# -- odd ---------------------------------------------------------------------------------------


def odd_batch(rows: int, seed: int) -> Batch:
    gen = generator(seed)
    features = torch.randn(rows, SEQ, WIDTH, generator=gen)
    targets = torch.randn(rows, SEQ, WIDTH, generator=gen)
    temperature = torch.rand((), generator=gen) + 0.5
    options = {"mask": ragged_mask(rows, gen), "extra": {"temperature": temperature, "none": None}}
    return (features,), {"targets": targets, **options}


@case("odd", odd_batch, loss=lambda out: out["losses"][0])
class Odd(nn.Module):
    """Frozen, unused and shared parameters, buffers, nested inputs and outputs, a masked mean."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 3)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.alias = self.shared
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.shared.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(
        self, features: Tensor, *, targets: Tensor, mask: Tensor, extra: dict[str, Tensor | None]
    ) -> dict[str, Any]:
        if self.training:
            self.calls += 1
        x = torch.tanh(self.frozen(features) * self.scale + self.shift)
        x = self.alias(torch.tanh(self.shared(x))) + self.tied(x)
        hidden = self.gain * x / extra["temperature"]
        losses = (hidden - targets).square().mean(-1)
        loss = (losses * mask).sum() / mask.sum()
        info = {"hidden": hidden, "nothing": None, "width": WIDTH}
        return {"losses": (loss, losses.mean()), "info": info, "list": [hidden[:, 0], 3]}
