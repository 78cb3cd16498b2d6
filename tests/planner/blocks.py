"""Blocks of known architectures, each with what a partition could stumble over."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import TrainingGraph


class GPTBlock(nn.Module):
    """Layer norms, biases, one matrix for queries, keys and values, causal attention."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaBlock(nn.Module):
    """RMS norms, rotary positions, keys and values shared by groups of heads, a gated MLP."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads, self.shared, self.size = heads, shared, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, shared * self.size, bias=False)
        self.v = nn.Linear(width, shared * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        hidden = 8 * width // 3 // 64 * 64
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            proj(h).view(rows, length, heads, self.size).transpose(1, 2)
            for proj, heads in ((self.q, self.heads), (self.k, self.shared), (self.v, self.shared))
        )
        at, part = (torch.arange(n, device=x.device) for n in (length, self.size))
        angles = at[:, None] / 10000 ** (part / self.size)
        q, k = (rotated(t, angles.cos(), angles.sin()) for t in (q, k))
        k, v = (repeated(t, self.heads // self.shared) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(rows, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    turned = torch.cat((-t[..., half:], t[..., :half]), dim=-1)
    return t * cos + turned * sin


def repeated(t: Tensor, times: int) -> Tensor:
    rows, heads, length, size = t.shape
    return t[:, :, None].expand(rows, heads, times, length, size).reshape(rows, -1, length, size)


class T5Block(nn.Module):
    """Attention written out, with a learned bias of each head by relative position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.bias = nn.Embedding(32, heads)
        self.wi, self.wo = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            proj(h).view(rows, length, self.heads, self.size).transpose(1, 2)
            for proj in (self.q, self.k, self.v)
        )
        at = torch.arange(length, device=x.device)
        apart = (at[None] - at[:, None]).clamp(0, 31)
        bias = self.bias(apart).permute(2, 0, 1)[None]
        weights = torch.softmax(q @ k.transpose(-1, -2) + bias, dim=-1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(rows, length, width))
        return x + self.wo(torch.relu(self.wi(self.norm2(x))))


class Experts(nn.Module):
    """Tokens of each row go to the experts as a one-hot product says, at most so many to each."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.route = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.down = nn.Parameter(torch.empty(experts, 4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, _, width = x.shape
        chances = self.route(x).softmax(-1)
        sent = F.one_hot(chances.argmax(-1), chances.shape[-1])
        place = (sent.cumsum(1) * sent).sum(-1)
        slots = F.one_hot(place.clamp(max=self.capacity), self.capacity + 1)[..., 1:]
        to = (sent[..., None] * slots[:, :, None]).to(x.dtype).flatten(2)
        given = to.transpose(1, 2) @ x
        given = given.view(rows, -1, self.capacity, width).transpose(0, 1).flatten(1, 2)
        done = torch.relu(given @ self.up) @ self.down
        back = done.view(-1, rows, self.capacity, width).transpose(0, 1).flatten(1, 2)
        return x + (to * chances.repeat_interleave(self.capacity, -1)) @ back


class Stack(nn.Module):
    """So many blocks."""

    def __init__(self, block: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def captured(model: nn.Module, *inputs: Any) -> TrainingGraph:
    """The joint graph of a model called on float tensors of these shapes."""
    shapes = tuple(torch.empty(shape, device=next(model.parameters()).device) for shape in inputs)
    return capture_of_rank(model, shapes, 0, 1)
