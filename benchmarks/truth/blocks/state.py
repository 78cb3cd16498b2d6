"""State in buffers and attributes that forward changes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, linear, register


def _zeros(*shape: int, **options):
    return lambda: torch.zeros(*shape, **options)


@register("rows", mean=_zeros(WIDTH))
def EmaInPlace(m, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - m.mean


@register("rows", mean=_zeros(WIDTH))
def EmaRebound(m, h: Tensor) -> Tensor:
    """Centred by a moving mean that is a new tensor every time."""
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)
    return h - m.mean


@register("rows", batches=_zeros((), dtype=torch.long), rows=_zeros(()))
def RowsSeen(m, h: Tensor) -> Tensor:
    m.batches += 1
    m.rows += h.shape[0]
    return h / (1 + 0.1 * m.batches) + m.rows / 100


@register("rows", unsaved=_zeros(2, WIDTH))
def LastBatch(m, h: Tensor) -> Tensor:
    """The mean and the last row of the batch before, in a buffer that is not saved."""
    out = h - 0.3 * m.unsaved.sum(0)
    m.unsaved = torch.stack([h.detach().mean(0), h.detach()[-1]])
    return out


@register("rows", queue=lambda: torch.randn(20, WIDTH))
def Queue(m, h: Tensor) -> Tensor:
    """A queue of keys as in MoCo, whose newest rows replace the oldest."""
    keys = m.queue.clone()
    out = h + torch.softmax(h @ keys.t(), -1) @ keys
    with torch.no_grad():
        m.queue.copy_(torch.cat([h.detach(), m.queue])[: m.queue.shape[0]])
    return out


@register("rows", queue=lambda: torch.randn(16, WIDTH), pointer=_zeros(1, dtype=torch.long))
def PointedQueue(m, h: Tensor) -> Tensor:
    """A queue with a pointer in a buffer, written by `index_copy_`."""
    keys = m.queue.clone()
    out = h + 0.3 * torch.tanh(h @ keys.t()) @ keys / 16
    m.queue.index_copy_(0, (m.pointer + torch.arange(h.shape[0])) % 16, h.detach())
    m.pointer.copy_((m.pointer + h.shape[0]) % 16)
    return out


@register("rows", calls=lambda: 0)
def CallCounter(m, h: Tensor) -> Tensor:
    m.calls += 1
    return h / m.calls


@register("rows", online=linear(), target=lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False))
def FrozenTwin(m, h: Tensor) -> tuple[Tensor, Tensor]:
    """A second module without gradients, whose parameters follow the first in forward (BYOL)."""
    with torch.no_grad():
        wanted = m.target(h)
        for slow, fast in zip(m.target.parameters(), m.online.parameters(), strict=True):
            slow.mul_(0.9).add_(fast, alpha=0.1)
    out = m.online(h)
    return h + out.tanh(), 0.1 * F.mse_loss(out, wanted)


@register("rows", ready=lambda: False, shift=_zeros(WIDTH))
def LazyActNorm(m, h: Tensor) -> Tensor:
    """Shift taken from the first batch, by a flag in Python."""
    if not m.ready:
        m.shift.copy_(h.detach().mean(0))
        m.ready = True
    return h - m.shift


@register("rows", history=list)
def HistoryList(m, h: Tensor) -> Tensor:
    """Means of batches in a Python list; the last two are subtracted."""
    out = h
    for mean in m.history[-2:]:
        out = out - 0.3 * mean
    m.history.append(h.detach().mean(0))
    return out


@register("rows", sized=True, state=lambda rows: torch.zeros(rows, WIDTH))
def PerRowState(m, h: Tensor) -> Tensor:
    """A state for every row, carried to the next call as in stateful RNNs."""
    out = (h + 0.5 * m.state).tanh()
    m.state.copy_(out.detach())
    return out
