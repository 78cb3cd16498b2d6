"""GPT of Megatron-LM as in its published runs, for planning only.

Scale and mask of attention's scores are left out, as Megatron's softmax kernel includes both.
`dropout` stands for a dropout whose mask every rank draws for its own shard. Its mask comes from
the value itself, and it moves and saves the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KEEP = 0.9  # share of activations after Megatron-LM's default dropout


@dataclass(frozen=True)
class Sizes:
    """Sizes and variant of a GPT."""

    hidden: int  # width of the residual stream
    layers: int  # number of blocks
    heads: int  # number of attention heads
    vocabulary: int  # entries of the embedding
    length: int  # tokens of a row
    tied: bool = True  # whether the embedding is the output layer too
    flash: bool = False  # whether attention saves no scores (flash attention) instead of all
    dropout: bool = True  # whether there is dropout
    bias: bool = True  # whether products and norms add biases
    mixed: bool = False  # whether parameters are float32, cast to bfloat16 where they are used


def dropout(x: Tensor) -> Tensor:
    """Dropout that saves a mask of a byte an element."""
    return torch.where(x < KEEP, x * (1.0 / KEEP), 0.0)


class Linear(nn.Linear):
    """A product in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Norm(nn.LayerNorm):
    """A layer norm in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias)


class Attention(nn.Module):
    """Causal attention with one product for queries, keys and values."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.qkv = Linear(sizes.hidden, 3 * sizes.hidden, bias=sizes.bias)
        self.out = Linear(sizes.hidden, sizes.hidden, bias=sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        width = self.sizes.hidden // self.sizes.heads
        q, k, v = self.qkv(x).unflatten(-1, (self.sizes.heads, 3 * width)).chunk(3, dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.sizes.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            shares = F.softmax(q @ k.transpose(-1, -2), dim=-1)  # scale and mask are inside
            y = (dropout(shares) if self.sizes.dropout else shares) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.norm1, self.norm2 = (Norm(sizes.hidden, bias=sizes.bias) for _ in range(2))
        self.attention = Attention(sizes)
        self.up = Linear(sizes.hidden, 4 * sizes.hidden, bias=sizes.bias)
        self.down = Linear(4 * sizes.hidden, sizes.hidden, bias=sizes.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        wide = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.down(wide))

    def dropout(self, x: Tensor) -> Tensor:
        """Apply dropout, if there is any."""
        return dropout(x) if self.sizes.dropout else x


class GPT(nn.Module):
    """A decoder that returns the mean loss of predicting the following tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.token = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.position = nn.Embedding(sizes.length, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = Norm(sizes.hidden, bias=sizes.bias)
        self.head = Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        positions = torch.arange(self.sizes.length, device=tokens.device)
        x = look_up(tokens, self.token) + look_up(positions, self.position)
        x = dropout(x) if self.sizes.dropout else x
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def look_up(indices: Tensor, table: nn.Embedding) -> Tensor:
    """Return rows of an embedding in bfloat16."""
    return F.embedding(indices, table.weight.to(torch.bfloat16))


class MasterAdamW(torch.optim.Optimizer):
    """AdamW of mixed precision, with states and a copy of the parameters in float32."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step; only the bytes of its states matter."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["master"] = parameter.detach().to(torch.float32, copy=True)
                state["exp_avg"] = torch.zeros_like(state["master"])
                state["exp_avg_sq"] = torch.zeros_like(state["master"])
            gradient = parameter.grad.float()
            state["exp_avg"].lerp_(gradient, 0.1)
            state["exp_avg_sq"].lerp_(gradient.square(), 0.001)
            scale = state["exp_avg_sq"].sqrt().add_(1e-8)
            state["master"].addcdiv_(state["exp_avg"], scale, value=-self.param_groups[0]["lr"])
            parameter.copy_(state["master"])


def make(sizes: Sizes, rows: int) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Return the model and a global batch, on the meta device."""
    with torch.device("meta"):
        model = GPT(sizes).to(torch.float32 if sizes.mixed else torch.bfloat16)
        tokens = torch.zeros(rows, sizes.length, dtype=torch.long)
    return model, (tokens, tokens)
