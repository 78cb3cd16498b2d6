"""Small models whose forward returns a loss, rows, or both, as loops expect of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, LENGTH, OUTPUTS, BLOCKS = 8, 3, 4, 2

FORMS = ("loss", "rows", "tuple", "dict", "losses", "views")
"""Results of forward: a loss, the rows of a prediction, both in a tuple or a dict, two losses, rows
and a column of them."""

factor = 1.0
"""A global that forward reads; loops change it."""


class Residual(nn.Module):
    """A block that keeps shapes, for rows [rows, WIDTH] and sequences [rows, LENGTH, WIDTH]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inner(self.norm(x)))


class Attention(nn.Module):
    """Self-attention of one layer with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Recurrent(nn.Module):
    """A GRU over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Statistics(nn.Module):
    """Batch norm over rows, behind an activation: before it, some gradients would be rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).tanh())


def perceptron() -> nn.Module:
    """A layer and its activation."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


NETS: Mapping[str, tuple[Callable[[], nn.Module], bool]] = {
    "perceptron": (perceptron, False),
    "statistics": (Statistics, False),
    "attention": (Attention, True),
    "recurrent": (Recurrent, True),
}
"""Name -> the inside of a block, and whether its input is a sequence."""


class Sloped(torch.autograd.Function):
    """The same values; the backward scales the gradient by what the module says then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.module.slope, None


class Net(nn.Module):
    """Residual blocks and a head, with the traits that a loop asks for.

    Args:
        net: a key of `NETS`.
        form: what forward returns, one of `FORMS`.
        traits: "environment", "global" and "attribute" read Python state; "extra" adds a tensor
            that requires gradients but is no parameter; "returned" returns a parameter beside the
            loss; "function" and "hook" read Python state in the backward; "checkpoint" computes
            blocks again in the backward.
    """

    def __init__(self, net: str, form: str, traits: tuple[str, ...] = ()) -> None:
        super().__init__()
        inner, self.reads_sequence = NETS[net]
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Residual(inner()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, OUTPUTS)
        # adapters are merged so: both weights have one tensor as their gradients
        self.delta = nn.Parameter(torch.full_like(self.head.weight, 0.1))
        self.form, self.traits, self.scale, self.slope = form, traits, 1.0, 1.0
        if "extra" in traits:
            self.extra = torch.ones(OUTPUTS, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.stem(x)
        for block in self.blocks:
            again = "checkpoint" in self.traits and h.requires_grad
            h = checkpoint(block, h, use_reentrant=True) if again else block(h)
        pooled = h.mean(1) if self.reads_sequence else h
        rows = F.linear(pooled, self.head.weight + self.delta, self.head.bias) * self._scale()
        if "extra" in self.traits:
            rows = rows * self.extra
        if "function" in self.traits:
            rows = Sloped.apply(rows, self)
        if "hook" in self.traits and rows.requires_grad:
            rows.register_hook(lambda gradient: gradient * self.slope)
        loss = F.mse_loss(rows, y)
        match self.form:
            case "loss" if "returned" in self.traits:
                return loss, self.head.weight
            case "loss":
                return loss
            case "rows":
                return rows
            case "tuple":
                return loss, rows
            case "views":
                return rows, rows[:, 0]
            case "dict":
                return {"loss": loss, "rows": rows}
        return loss, F.l1_loss(self.stem(x).flatten(1).mean(1), y.mean(1))

    def _scale(self) -> float:
        scale = self.scale if "attribute" in self.traits else 1.0
        if "environment" in self.traits:
            scale *= float(os.environ.get("LOOPS_SCALE", "1"))
        return scale * factor if "global" in self.traits else scale


def batch_of(net: str, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs [rows, WIDTH] or [rows, LENGTH, WIDTH], and targets [rows, OUTPUTS]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, LENGTH, WIDTH) if NETS[net][1] else (rows, WIDTH)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, OUTPUTS, generator=generator, dtype=torch.float64)
