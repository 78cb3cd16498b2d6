"""The transformers of `models` as a user of torch's `parallelize_module` writes them.

Queries, keys and values have a linear layer each, for `ColwiseParallel` cuts a fused one across
heads. The plan is Megatron's: columns then rows in attention and feed-forward, embeddings and
output layer by vocabulary, a loss over shards of the classes; with sequence parallelism what lies
between is sharded by position. So it is in the transformer that torch tests itself with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import autopar
from benchmarks.models import GPT, HEADS, Encoder


class Attention(nn.Module):
    """Attention over as many heads as this rank has."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.causal, self.each = causal, width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, tokens, width) to the same shape."""
        heads = (layer(x).unflatten(-1, (-1, self.each)) for layer in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, tokens, width) to the same shape."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward; causal and normalised before (decoder), or neither (encoder)."""

    def __init__(self, width: int, heads: int, *, decoder: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=decoder)
        self.feedforward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's part of (rows, tokens, width) to the same shape."""
        if self.decoder:
            x = x + self.attention(self.norm1(x))
            return x + self.feedforward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feedforward(x))


class Transformer(nn.Module):
    """`models.GPT` if it is a decoder, else `models.Encoder`; as large as that one."""

    def __init__(self, model: GPT | Encoder) -> None:
        super().__init__()
        self.decoder = decoder = isinstance(model, GPT)
        self.tied = model.head.weight is model.token.weight
        (entries, width), positions = model.token.weight.shape, len(model.position.weight)
        heads = model.blocks[0].heads if isinstance(model, GPT) else HEADS
        self.token, self.position = nn.Embedding(entries, width), nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, decoder=decoder) for _ in model.blocks)
        self.head = nn.Linear(width, entries, bias=not decoder)
        self.tie()

    def tie(self) -> None:
        """Makes the embedding and the output layer one, where they are in the model."""
        if self.tied:
            self.head.weight = self.token.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of predicting tokens `y`."""
        h = self.token(x) + self.position(torch.arange(x.shape[1]))
        h = h if self.decoder else self.norm(h)
        for block in self.blocks:
            h = block(h)
        h = self.norm(h) if self.decoder else h
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def like(model: nn.Module) -> Transformer:
    """Return the same model with the same weights."""
    assert isinstance(model, GPT | Encoder)
    made = Transformer(model)
    state = {}
    for name, value in model.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if ".qkv." in name:
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                state[name.replace(".qkv.", f".attention.{part}.")] = rows
        else:
            state[name] = value
    made.load_state_dict(state)
    return made


RENAMED = {
    "self_attn.in_proj_": "qkv.",
    "self_attn.out_proj": "out",
    "linear1": "up",
    "linear2": "down",
    ".out.": ".attention.out.",
    ".up.": ".feedforward.up.",
    ".down.": ".feedforward.down.",
}
"""What torch's encoder layer and our decoder block call things, and where they are here."""


PINS = {
    "gpt": {
        "token.weight": autopar.Shard(0),
        "blocks.*.qkv.*": autopar.Shard(0, 3),
        "blocks.*.up.*": autopar.Shard(0),
        "blocks.*.out.weight": autopar.Shard(1),
        "blocks.*.down.weight": autopar.Shard(1),
    },
    "encoder": {
        "token.weight": autopar.Shard(0),
        "head.*": autopar.Shard(0),
        "blocks.*.in_proj_*": autopar.Shard(0, 3),
        "blocks.*.linear1.*": autopar.Shard(0),
        "blocks.*.out_proj.weight": autopar.Shard(1),
        "blocks.*.linear2.weight": autopar.Shard(1),
    },
}
"""The same layout of parameters for autopar; what lies between is left to it."""


def parallelized(model: Transformer, mesh: DeviceMesh, *, sequence: bool) -> Transformer:
    """Return the model, cut along a mesh of one dim; `sequence`: between blocks, by position."""
    between = Shard(1) if sequence else Replicate()
    entering = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    block: dict[str, ParallelStyle] = {
        "attention": entering,
        **{f"attention.{part}": ColwiseParallel() for part in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=between),
        "feedforward": entering,
        "feedforward.up": ColwiseParallel(),
        "feedforward.down": RowwiseParallel(output_layouts=between),
    }
    root: dict[str, ParallelStyle] = {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "position": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(0) if sequence else Replicate()
        ),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        norms = ("norm1", "norm2")
        block |= dict.fromkeys(norms, SequenceParallel(use_local_output=True))
        root["norm"] = SequenceParallel(use_local_output=True)
    for layer in model.blocks:
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, root)
    model.tie()
    return model
