"""Views that regroup rows, windows along the batch, and weights by a row's position."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.truth.registry import WIDTH, define_all, linear, register


def _positions(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0], dtype=h.dtype)


define_all(
    "rows",
    {
        "columns_of_the_batch": lambda h: h + torch.softmax(h.t(), dim=-1).t() * h.shape[0],
        "padded": lambda h: F.pad(h, (0, 0, 0, 1), value=1.0)[1:] + 0.1 * h,
        "rolled": lambda h: h + 0.5 * h.roll(1, 0),
        "diffed": lambda h: h + 0.5 * torch.diff(h, dim=0, prepend=h[-1:]),
        "unfolded": lambda h: h + 0.5 * torch.cat([h[-2:], h]).unfold(0, 3, 1).mean(-1),
        "second_half_zeroed": lambda h: torch.cat([h[:3], torch.zeros_like(h[3:])]) + 0.1 * h,
        "every_second_row": lambda h: h - 0.5 * h[::2].mean(0),
        "numpy_weights": lambda h: h * torch.from_numpy(np.linspace(0.5, 1.5, h.shape[0]))[:, None],
        "decayed": lambda h: h * 0.9 ** _positions(h)[:, None],
        "divided_by_count": lambda h: h * (1 + 4 / h.shape[0]),
        "first_rows_marked": lambda h: torch.where((_positions(h) < 2)[:, None], h * 2, h),
    },
)


@register("rows", divides=2)
def halves(h: Tensor) -> Tensor:
    first, second = h.view(2, h.shape[0] // 2, WIDTH)
    return torch.cat([first + 0.5 * second, second - 0.5 * first])


@register("rows", linear=linear(), shift=lambda: torch.tensor([-1.0, 0.0, 1.0]))
def Repeated(m, h: Tensor) -> Tensor:
    """Every row three times, through a layer, then the mean of the three."""
    copies = h.repeat_interleave(3, dim=0) + m.shift.repeat(h.shape[0])[:, None]
    return m.linear(copies).tanh().view(-1, 3, WIDTH).mean(1)


@register("rows")
def unbound(h: Tensor) -> Tensor:
    """A Python loop over rows, each with the one before."""
    rows = list(h.unbind(0))
    out = [rows[0]]
    for row in rows[1:]:
        out.append(row + 0.5 * torch.tanh(out[-1]))
    return torch.stack(out)


@register("rows")
def strided_windows(h: Tensor) -> Tensor:
    shape, strides = (h.shape[0] - 1, 2, WIDTH), (WIDTH, WIDTH, 1)
    windows = h.contiguous().as_strided(shape, strides)
    return torch.cat([windows.mean(1), h[-1:]])


@register("rows", conv=lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
def ConvolvedOverRows(m, h: Tensor) -> Tensor:
    return h + m.conv(h.t()[None])[0].t()


@register("rows", sized=True, offset=lambda rows: nn.Parameter(torch.randn(rows, WIDTH)))
def RowParameter(m, h: Tensor) -> Tensor:
    return h + m.offset


@register("rows", sized=True, mix=lambda rows: nn.Linear(rows, rows))
def RowMixer(m, h: Tensor) -> Tensor:
    return h + m.mix(h.t()).t()
