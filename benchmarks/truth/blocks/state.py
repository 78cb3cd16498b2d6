"""State in buffers and attributes that forward changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.truth.registry import WIDTH, register


@register("rows")
class EmaInPlace(nn.Module):
    """Centred by a moving mean that is updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        return h - self.mean


@register("rows")
class EmaRebound(nn.Module):
    """Centred by a moving mean that is a new tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


@register("rows")
class RunningMax(nn.Module):
    """Scaled by the largest value seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, h.detach().abs().amax(0)))
        return h / (0.5 + self.largest)


@register("rows")
class RowsSeen(nn.Module):
    """Counts batches and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        self.batches += 1
        self.rows += h.shape[0]
        return h / (1 + 0.1 * self.batches) + self.rows / 100


@register("rows")
class LastBatch(nn.Module):
    """Remembers the mean and the last row of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        out = h - 0.3 * self.before.sum(0)
        self.before = torch.stack([h.detach().mean(0), h.detach()[-1]])
        return out


@register("rows")
class Queue(nn.Module):
    """A queue of keys as in MoCo, whose newest rows replace the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(20, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        keys = self.queue.clone()
        out = h + torch.softmax(h @ keys.t(), -1) @ keys
        with torch.no_grad():
            self.queue.copy_(torch.cat([h.detach(), self.queue])[: self.queue.shape[0]])
        return out


@register("rows")
class PointedQueue(nn.Module):
    """A queue with a pointer in a buffer, written by `index_copy_`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(16, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        keys = self.queue.clone()
        out = h + 0.3 * torch.tanh(h @ keys.t()) @ keys / 16
        places = (self.pointer + torch.arange(h.shape[0])) % 16
        self.queue.index_copy_(0, places, h.detach())
        self.pointer.copy_((self.pointer + h.shape[0]) % 16)
        return out


@register("rows")
class CallCounter(nn.Module):
    """A Python number that counts calls and scales the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h / self.calls


@register("rows")
class Warming(nn.Module):
    """A Python float that grows to one: a schedule in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.25

    def forward(self, h: Tensor) -> Tensor:
        self.factor = min(1.0, self.factor * 2)
        return h * self.factor


@register("rows")
class DinoCentre(nn.Module):
    """A centre of teacher outputs, as in DINO, updated after use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, WIDTH))

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        teacher = torch.softmax((h.detach() - self.centre) / 0.5, -1)
        loss = -(teacher * torch.log_softmax(h, -1)).sum(-1).mean()
        self.centre.mul_(0.9).add_(0.1 * h.detach().sum(0, keepdim=True) / h.shape[0])
        return h, 0.1 * loss


@register("rows")
class Codebook(nn.Module):
    """Vector quantisation with a codebook that follows the rows, as in VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(h.detach(), self.codes).argmin(1)
        hot = nn.functional.one_hot(nearest, 4).to(h.dtype)
        code = self.codes[nearest]
        loss = (h - code.detach()).square().mean()
        means = hot.t() @ h.detach() / (hot.sum(0)[:, None] + 1)
        self.codes.copy_(0.9 * self.codes + 0.1 * means)
        return h + (code - h).detach() * 0.5, 0.25 * loss
