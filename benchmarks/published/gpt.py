"""The GPT of Megatron-LM as its published runs trained it, for planning: it is never run.

Scale and mask of attention's scores are left out, as Megatron's kernel for the softmax does both
on its way. `drop` stands in for a dropout whose mask every rank draws for its own shard, as
Megatron's do: the mask comes from the value itself, and the same bytes are moved and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

KEPT = 0.9  # of activations, by Megatron-LM's default dropout


@dataclass(frozen=True)
class Form:
    """What distinguishes the GPTs.

    Attributes:
        hidden: width of the residual stream.
        layers: how many blocks.
        heads: of each.
        vocabulary: entries of the embedding.
        length: positions of a row.
        tied: whether the embedding is the output layer too.
        flash: whether attention keeps no scores (flash attention), instead of all of them.
        dropped: whether there is dropout.
    """

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    tied: bool = True
    flash: bool = False
    dropped: bool = True


def drop(x: Tensor) -> Tensor:
    """Dropout: a mask of a byte an element is kept."""
    return torch.where(x < KEPT, x * (1.0 / KEPT), 0.0)


class Attention(nn.Module):
    """Causal attention with one product for queries, keys and values."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.qkv = nn.Linear(form.hidden, 3 * form.hidden)
        self.out = nn.Linear(form.hidden, form.hidden)

    def forward(self, x: Tensor) -> Tensor:
        width = self.form.hidden // self.form.heads
        q, k, v = self.qkv(x).unflatten(-1, (self.form.heads, 3 * width)).chunk(3, dim=-1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.form.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            shares = F.softmax(q @ k.transpose(-1, -2), dim=-1)  # scale and mask are inside
            y = (drop(shares) if self.form.dropped else shares) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised stream."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.norm1, self.norm2 = nn.LayerNorm(form.hidden), nn.LayerNorm(form.hidden)
        self.attention = Attention(form)
        self.up = nn.Linear(form.hidden, 4 * form.hidden)
        self.down = nn.Linear(4 * form.hidden, form.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropped(self.attention(self.norm1(x)))
        wide = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.dropped(self.down(wide))

    def dropped(self, x: Tensor) -> Tensor:
        """With dropout, if there is any."""
        return drop(x) if self.form.dropped else x


class GPT(nn.Module):
    """Called with tokens and the tokens that follow them, it returns its mean loss."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.token = nn.Embedding(form.vocabulary, form.hidden)
        self.position = nn.Embedding(form.length, form.hidden)
        self.blocks = nn.ModuleList(Block(form) for _ in range(form.layers))
        self.norm = nn.LayerNorm(form.hidden)
        self.head = nn.Linear(form.hidden, form.vocabulary, bias=False)
        if form.tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        positions = torch.arange(self.form.length, device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        x = drop(x) if self.form.dropped else x
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class MasterAdamW(torch.optim.Optimizer):
    """AdamW whose states and copy of the parameters are in float32, as mixed precision has them."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step, written plainly: only the states that it keeps are of interest."""
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


def make(form: Form, rows: int) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """The model in bfloat16 and a global batch, on the meta device."""
    with torch.device("meta"):
        model = GPT(form).to(torch.bfloat16)
        tokens = torch.zeros(rows, form.length, dtype=torch.long)
    return model, (tokens, tokens)
