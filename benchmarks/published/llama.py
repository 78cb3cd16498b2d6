"""Llama of torchtitan as in its published runs of 2024, for planning only.

FSDP casts parameters to bfloat16 as it gathers them, so that activations are bfloat16 throughout.
Norms are the operators that torch's `rms_norm` consisted of before it became one kernel. Queries
and keys are rotated in float32; one product stands for that of complex numbers, whose bytes it
moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published.gpt import Linear, look_up
from examples.plan_llama import Size

NARROW, LARGEST = torch.float8_e4m3fn, 448.0  # dtype of float8 products, and its largest number


def narrowed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor in float8, and its scale."""
    scale = x.abs().max().float() / LARGEST
    return (x / scale.to(x.dtype)).to(NARROW), scale


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return a product in float8, of operands that are scaled by their largest numbers."""
    (a, a_scale), (b, b_scale) = narrowed(x), narrowed(y)
    columns = b.t().contiguous().t()
    scaled = torch.ops.aten._scaled_mm.default
    return scaled(a.contiguous(), columns, a_scale, b_scale, None, None, x.dtype)


class Float8Product(torch.autograd.Function):
    """A linear layer's product; its gradients are products in float8, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product(gradient, weight), product(gradient.t(), x)


class Float8Linear(Linear):
    """A product in float8."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = Float8Product.apply(rows, self.weight.to(x.dtype))
        return y.view(*x.shape[:-1], -1)


class Norm(nn.Module):
    """Root mean square norm in float32, operator by operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (scaled * self.weight.to(x.dtype)).to(x.dtype)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Move the bytes of a rotation of (rows, positions, heads, head width)."""
    return (x.float() * angles).to(x.dtype)


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, size: Size, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.width, self.share = size.width // size.heads, size.heads // size.groups
        inner = size.groups * self.width
        self.q = layer(size.width, size.width, bias=False)
        self.k, self.v = (layer(size.width, inner, bias=False) for _ in range(2))
        self.out = layer(size.width, size.width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        each = (layer(x).unflatten(-1, (-1, self.width)) for layer in (self.q, self.k, self.v))
        q, k, v = each
        q, k = rotate(q, angles), rotate(k, angles)
        if self.share > 1:
            k, v = (t.repeat_interleave(self.share, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, size: Size, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.gate, self.up = (layer(size.width, size.inner, bias=False) for _ in range(2))
        self.down = layer(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, size: Size, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(size.width), Norm(size.width)
        self.attention, self.feedforward = Attention(size, layer), FeedForward(size, layer)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.feedforward(self.norm2(x))


class Llama(nn.Module):
    """A decoder that returns the mean loss of predicting the following tokens."""

    def __init__(self, size: Size, length: int, layer: type[nn.Linear] = Linear) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size, layer) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.head = Linear(size.width, size.vocabulary, bias=False)
        self.angles: Tensor
        self.register_buffer("angles", torch.zeros(length, 1, size.width // size.heads))

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        x = look_up(tokens, self.token)
        for block in self.blocks:
            x = block(x, self.angles)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def make(
    size: Size, length: int, rows: int, *, float8: bool = False
) -> tuple[nn.Module, tuple[Any, Any]]:
    """Return the model in float32 and a global batch, on the meta device."""
    with torch.device("meta"):
        tokens = torch.zeros(rows, length, dtype=torch.long)
        return Llama(size, length, Float8Linear if float8 else Linear), (tokens, tokens)
