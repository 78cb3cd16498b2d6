"""`BatchSlices`: splits the batch over ranks, and over micro-batches of a rank."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from autopar.core.ir.placement import Shard, UnevenRanks, even_rows
from autopar.errors import BatchError

BATCH = "batch"
"""Name of the batch axis, whose coordinates are the micro-batches of all data-parallel ranks."""


@dataclass(frozen=True)
class BatchSlices:
    """The slices of a batch, and the slice that a graph computes.

    A sharded dim consists of equal units: one per slice if slices are even, otherwise one per row.

    Attributes:
        rows: number of rows of the whole batch.
        over_time: whether slices are micro-batches, which one rank computes in sequence.
        held: rows of each slice; () for those of `even_rows`.
    """

    count: int
    index: int
    rows: int
    over_time: bool = False
    held: tuple[int, ...] = ()

    @property
    def is_even(self) -> bool:
        return not self.held and self.rows % self.count == 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each slice."""
        return self.held or even_rows(self.rows, self.count)

    @property
    def axis_size(self) -> int:
        """Size of the batch axis: an `UnevenRanks` if slices are uneven."""
        return self.count if self.is_even else UnevenRanks(self.count, self.rows, self.held)

    @property
    def units(self) -> int:
        """Number of units of a sharded dim, over all slices."""
        return self.count if self.is_even else self.rows

    @property
    def local_units(self) -> int:
        return 1 if self.is_even else self.own_rows[1]

    @property
    def own_rows(self) -> tuple[int, int]:
        """First row and number of rows of this slice."""
        return UnevenRanks(self.count, self.rows, self.held).part(self.index)

    @property
    def next_alike(self) -> BatchSlices:
        """The next slice with as many rows, after the last the first; itself if there is none."""
        if self.is_even:
            return replace(self, index=(self.index + 1) % self.count)
        sizes, first = self.sizes, self.index + 1
        after = (index % self.count for index in range(first, first + self.count))
        return replace(self, index=next(i for i in after if sizes[i] == sizes[self.index]))

    def over_micro_batches(self, count: int, even: bool = False) -> list[BatchSlices]:
        """The micro-batches of this slice, which differ by at most one row, larger ones first.

        Raises:
            BatchError: a slice has fewer rows, or with `even` micro-batches would differ.
        """
        sizes = (self.rows // self.count,) if self.is_even else self.sizes
        if min(sizes) < count or (even and len({*sizes, min(sizes) // count * count}) > 1):
            equal, least = ("equal ", "a multiple of") if even else ("", "at least")
            raise BatchError(
                f"a batch of {self.rows} rows, {min(sizes)} of them on a rank, cannot be cut into "
                f"{count} {equal}micro-batches on each of {self.count} ranks. Give {least} "
                f"{count * self.count} rows, or other micro_batches."
            )
        parts, held = self.count * count, self.held
        if self.rows % parts or not self.is_even:
            total = tuple(n for r in self.sizes for n in even_rows(r, count))
            held = () if total == even_rows(self.rows, parts) else total
        first = self.index * count
        return [BatchSlices(parts, first + i, self.rows, True, held) for i in range(count)]

    def unit_indices(self, device: torch.device | None = None) -> torch.Tensor:
        """Indices of this slice's units, the value of `BatchIndex`: int64 [local_units]."""
        first = self.index if self.is_even else self.own_rows[0]
        return torch.arange(first, first + self.local_units, device=device)

    def divides(self, size: int, interleave: int = 1) -> bool:
        """Whether each of `interleave` pieces of a dim of `size` consists of whole units."""
        return size > 0 and size % (interleave * self.units) == 0

    def split_shape(self, shape: tuple[int, ...], shard: Shard) -> tuple[list[int], int]:
        """Shape with `shard.dim` split into [pieces, units, unit size], and the index of units."""
        size = shape[shard.dim] // (shard.interleave * self.units)
        split = [shard.interleave, self.units, size]
        return [*shape[: shard.dim], *split, *shape[shard.dim + 1 :]], shard.dim + 1
