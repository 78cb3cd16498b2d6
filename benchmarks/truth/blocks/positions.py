"""Weights and parameters by the position of a row in the batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.truth.registry import WIDTH, register


@register("rows")
def linspace_weights(h: Tensor) -> Tensor:
    return h * torch.linspace(0.5, 1.5, h.shape[0], dtype=h.dtype)[:, None]


@register("rows")
def listed_weights(h: Tensor) -> Tensor:
    """Weights written out in Python."""
    listed = torch.tensor([1.0 + 0.1 * i for i in range(h.shape[0])], dtype=h.dtype)
    return h * listed[:, None]


@register("rows")
def numpy_weights(h: Tensor) -> Tensor:
    return h * torch.from_numpy(np.linspace(0.5, 1.5, h.shape[0]))[:, None]


@register("rows")
def windowed(h: Tensor) -> Tensor:
    window = torch.hann_window(h.shape[0] + 2, dtype=h.dtype)[1:-1]
    return h * (0.5 + window[:, None])


@register("rows")
def decayed(h: Tensor) -> Tensor:
    """A power of the row's number."""
    return h * 0.9 ** torch.arange(h.shape[0], dtype=h.dtype)[:, None]


@register("rows")
def alternating(h: Tensor) -> Tensor:
    sign = torch.ones(h.shape[0], dtype=h.dtype)
    sign[1::2] = -1
    return h * sign[:, None]


@register("rows")
def divided_by_count(h: Tensor) -> Tensor:
    """The number of rows as a number."""
    return h * (1 + 4 / h.shape[0])


@register("rows", sized=True)
class RowParameter(nn.Module):
    """A parameter of a row for every row of the batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.offset


@register("rows", sized=True)
class RowMixer(nn.Module):
    """A learnt matrix over the rows of the batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.mix = nn.Linear(rows, rows)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.mix(h.t()).t()


@register("rows", sized=True)
class RowWeightsBuffer(nn.Module):
    """A weight for every row in a buffer."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(rows, 1))

    def forward(self, h: Tensor) -> Tensor:
        return h * (0.5 + self.weight)


@register("rows")
class PositionTable(nn.Module):
    """An embedding of the number of the row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table(torch.arange(h.shape[0]))


@register("rows")
def distance_of_positions(h: Tensor) -> Tensor:
    """Rows mixed by how far apart they stand."""
    position = torch.arange(h.shape[0], dtype=h.dtype)
    near = torch.exp(-(position[:, None] - position[None]).abs())
    return near @ h / near.sum(1, keepdim=True)


@register("rows")
def first_rows_marked(h: Tensor) -> Tensor:
    marked = torch.arange(h.shape[0]) < 2
    return torch.where(marked[:, None], h * 2, h)


@register("rows")
def identity_added(h: Tensor) -> Tensor:
    """An identity matrix of the batch, cut to the width."""
    return h + torch.eye(h.shape[0], WIDTH, dtype=h.dtype)
