"""State that methods in use keep: teachers, thresholds, centres, and data-dependent starts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import CLASSES, WIDTH, register


@register("rows")
class MeanTeacher(nn.Module):
    """A teacher whose weights, in a buffer, follow those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("teacher", self.student.weight.detach().clone())

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.teacher.lerp_(self.student.weight, 0.1)
            wanted = h @ self.teacher.t()
        out = self.student(h)
        return h + out, 0.1 * (F.normalize(out) - F.normalize(wanted)).square().mean()


@register("rows")
class FrozenTwin(nn.Module):
    """A second module without gradients, whose parameters follow the first in forward (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.target.requires_grad_(False)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.target(h)
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        out = self.online(h)
        return h + out.tanh(), 0.1 * F.mse_loss(out, wanted)


@register("rows")
class ActNorm(nn.Module):
    """Shift and scale taken from the first batch, by a flag in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.zeros(()))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.shift.copy_(torch.where(self.ready > 0, self.shift, h.mean(0)))
            self.scale.copy_(torch.where(self.ready > 0, self.scale, h.std(0) + 0.1))
            self.ready.fill_(1.0)
        return (h - self.shift) / self.scale


@register("rows")
class LazyActNorm(nn.Module):
    """The same by a flag in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        if not self.ready:
            self.shift.copy_(h.detach().mean(0))
            self.ready = True
        return h - self.shift


@register("rows")
class BatchRenorm(nn.Module):
    """Batch renormalisation: corrections by running statistics, which are updated after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("std", torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        mean, std = h.mean(0), h.std(0, unbiased=False) + 0.1
        r = (std.detach() / self.std).clamp(0.3, 3.0)
        d = ((mean.detach() - self.mean) / self.std).clamp(-2.0, 2.0)
        out = (h - mean) / std * r + d
        self.mean.lerp_(mean.detach(), 0.1)
        self.std.lerp_(std.detach(), 0.1)
        return out


@register("rows")
class ClassCentres(nn.Module):
    """Centres of classes that follow their rows, and the distance to them (centre loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(CLASSES, WIDTH))

    def forward(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = (h - self.centres[labels]).square().mean()
        with torch.no_grad():
            sums = torch.zeros_like(self.centres).index_add_(0, labels, h)
            counts = F.one_hot(labels, CLASSES).sum(0)[:, None]
            self.centres = torch.where(
                counts > 0, 0.7 * self.centres + 0.3 * sums / counts.clamp(min=1), self.centres
            )
        return h, 0.2 * loss


@register("rows")
class SeenClasses(nn.Module):
    """Counts of classes so far adjust what rows weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(CLASSES, dtype=torch.long))

    def forward(self, h: Tensor, labels: Tensor) -> Tensor:
        self.seen.scatter_add_(0, labels, torch.ones_like(labels))
        share = self.seen / self.seen.sum()
        return h / (0.5 + share[labels][:, None])


@register("rows")
class AdaptiveThreshold(nn.Module):
    """A threshold that follows the mean confidence of the batch, in a mask (FreeMatch)."""

    def __init__(self) -> None:
        super().__init__()
        self.classify = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("threshold", torch.full((), 1 / CLASSES))

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        p = self.classify(h).softmax(-1)
        confidence, guess = p.detach().max(-1)
        self.threshold.mul_(0.5).add_(0.5 * confidence.mean())
        sure = (confidence >= self.threshold).to(h.dtype)
        loss = -(p.gather(1, guess[:, None])[:, 0].log() * sure).sum() / sure.sum().clamp(min=1)
        return h, 0.3 * loss


@register("rows")
class LossScale(nn.Module):
    """An auxiliary loss divided by its own moving mean, kept in a Python-held tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usual", torch.ones(()), persistent=False)

    def forward(self, h: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        loss = (h - target).square().mean()
        self.usual = 0.5 * self.usual + 0.5 * loss.detach()
        return h, 0.3 * loss / self.usual


@register("rows")
class HistoryList(nn.Module):
    """Means of batches in a Python list; the last two are subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, h: Tensor) -> Tensor:
        out = h
        for mean in self.history[-2:]:
            out = out - 0.3 * mean
        self.history.append(h.detach().mean(0))
        return out


@register("rows")
class KeptOutput(nn.Module):
    """An attribute that forward sets and a later part of the same forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.attention: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        self.attention = torch.softmax(self.linear(h), dim=-1)
        return h * (1 + self.attention)


@register("rows")
class StepSchedule(nn.Module):
    """A factor by the number of calls, counted in a buffer and read as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        self.step.add_(1)
        return h * torch.cos(self.step * 0.3)


@register("rows", sized=True)
class PerRowState(nn.Module):
    """A state for every place in the batch, carried to the next call as in stateful RNNs."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(rows, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        out = (h + 0.5 * self.state).tanh()
        self.state.copy_(out.detach())
        return out


@register("rows")
class SampleMemory(nn.Module):
    """A memory bank of samples by their number, as in instance discrimination."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(16, WIDTH))

    def forward(self, h: Tensor, permutation: Tensor) -> Tensor:
        before = self.bank[permutation]
        self.bank.index_copy_(0, permutation, 0.5 * before + 0.5 * h.detach())
        return h + 0.3 * before


@register("rows")
class FeatureQueueRebound(nn.Module):
    """A queue that is a new tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(12, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        out = h + 0.3 * torch.tanh(h @ self.queue.t()) @ self.queue / 12
        self.queue = torch.cat([self.queue, h.detach()])[-12:]
        return out
