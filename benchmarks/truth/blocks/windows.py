"""Windows that slide along the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, register


@register("rows")
def rolled(h: Tensor) -> Tensor:
    return h + 0.5 * h.roll(1, 0)


@register("rows")
def shifted_differences(h: Tensor) -> Tensor:
    steps = h[1:] - h[:-1]
    return h + 0.5 * torch.cat([h[:1], steps])


@register("rows")
def diffed(h: Tensor) -> Tensor:
    return h + 0.5 * torch.diff(h, dim=0, prepend=h[-1:])


@register("rows")
def unfolded(h: Tensor) -> Tensor:
    """Means of windows of three rows."""
    windows = torch.cat([h[-2:], h]).unfold(0, 3, 1)
    return h + 0.5 * windows.mean(-1)


@register("rows")
class ConvolvedOverRows(nn.Module):
    """A convolution along the batch, features as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.conv(h.t()[None])[0].t()


@register("rows")
class UnbatchedConvolution(nn.Module):
    """A convolution along the batch without a dim of its own for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.conv(h.t()).t())


@register("rows")
def averaged_over_rows(h: Tensor) -> Tensor:
    return F.avg_pool1d(h.t()[None], 3, stride=1, padding=1)[0].t() + 0.5 * h


@register("rows")
def max_pooled_over_rows(h: Tensor) -> Tensor:
    return F.max_pool1d(h.t()[None], 3, stride=1, padding=1)[0].t() + 0.5 * h


@register("rows", divides=2)
def pooled_and_upsampled(h: Tensor) -> Tensor:
    """Pairs of rows averaged, then repeated."""
    coarse = F.avg_pool1d(h.t()[None], 2)
    return h - 0.5 * F.interpolate(coarse, scale_factor=2)[0].t()


@register("rows")
def adaptively_pooled(h: Tensor) -> Tensor:
    """Pooled to two bins of the batch."""
    bins = F.adaptive_avg_pool1d(h.t()[None], 2)[0].t()
    return h + 0.5 * bins[0] - 0.2 * bins[1]


@register("rows")
def shifted_by_two(h: Tensor) -> Tensor:
    return torch.cat([h[2:], h[:2]]) * 0.5 + h


@register("rows")
def neighbour_similarity(h: Tensor) -> Tensor:
    near = F.cosine_similarity(h, h.roll(-1, 0), dim=1)
    return h * (1 + 0.5 * near[:, None])


@register("rows")
def second_half_zeroed(h: Tensor) -> Tensor:
    """Only the first three rows keep what they hold."""
    return torch.cat([h[:3], torch.zeros_like(h[3:])]) + 0.1 * h


@register("rows")
def narrowed(h: Tensor) -> Tensor:
    return h + 0.5 * h.narrow(0, 1, 2).sum(0)


@register("rows")
def every_second_row(h: Tensor) -> Tensor:
    """The mean of every second row."""
    return h - 0.5 * h[::2].mean(0)
