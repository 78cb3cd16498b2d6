"""`BatchSlices`: how the rows of a batch are cut, over ranks and over time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.ir.placement import Shard, UnevenRanks, even_rows

BATCH = "batch"
"""Name of the batch axis: every micro-batch of every data-parallel rank is a place on it."""


@dataclass(frozen=True)
class BatchSlices:
    """The slices of a batch, and which of them a graph is for.

    Attributes:
        count: number of slices.
        index: place of this slice.
        rows: rows of the whole batch.
        in_time: whether several slices of a rank pass one after the other, as micro-batches.
    """

    count: int
    index: int
    rows: int
    over_time: bool = False

    @property
    def is_even(self) -> bool:
        """Whether all slices have as many rows."""
        return self.rows % self.count == 0

    @property
    def axis_size(self) -> int:
        """The size of the batch axis, as functions of shapes take it."""
        return self.count if self.is_even else UnevenRanks(self.count, self.rows)

    @property
    def units(self) -> int:
        """Number of equal units that a sharded dim consists of: slices, or rows if uneven."""
        return self.count if self.is_even else self.rows

    @property
    def local_units(self) -> int:
        """Units of this slice."""
        return 1 if self.is_even else even_rows(self.rows, self.count)[self.index]

    def unit_indices(self, device: torch.device | None = None) -> torch.Tensor:
        """The value of `BatchIndex`: the numbers of this slice's units, int64 [held]."""
        sizes = even_rows(self.rows, self.count)
        first = self.index if self.is_even else sum(sizes[: self.index])
        return torch.arange(first, first + self.local_units, device=device)

    def divides(self, size: int, interleave: int = 1) -> bool:
        """Whether a dim of `size` consists of whole units in each of `interleave` pieces."""
        return size > 0 and size % (interleave * self.units) == 0

    def split_shape(self, shape: tuple[int, ...], shard: Shard) -> tuple[list[int], int]:
        """A shape with the sharded dim as [pieces, units, size of a unit], and the units' dim."""
        size = shape[shard.dim] // (shard.interleave * self.units)
        inner = [shard.interleave, self.units, size]
        return [*shape[: shard.dim], *inner, *shape[shard.dim + 1 :]], shard.dim + 1
