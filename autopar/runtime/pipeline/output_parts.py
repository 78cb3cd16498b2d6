"""`OutputParts`: an output of a stage, in the parts of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.border.lazy_rows import LazyRows
from autopar.runtime.process_groups import explaining_comm_errors


@dataclass
class OutputParts:
    """An output on the rank of its stage, and the way to the other ranks of the pipeline.

    Attributes:
        parts: the output of each micro-batch on that rank; () on others.
        batch_dim: the dim of rows, None without one.
        owner: that rank's place in the pipeline.
        group: process group along the pipeline, None if a rank has all stages.
        announce: agrees with the other ranks on a reading before it starts.
    """

    parts: Sequence[torch.Tensor]
    batch_dim: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    owner: int
    group: dist.ProcessGroup | None
    announce: Callable[[], None]

    def shape_of_whole(self, own: torch.Tensor) -> tuple[int, ...]:
        """The shape of the output of all micro-batches."""
        return self.shape

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The output on every rank; all ranks call this at once."""
        self.announce()
        finish_exchange()
        with explaining_comm_errors("the sending of an output"):
            return self.broadcast()

    def broadcast(self) -> torch.Tensor:
        """Sends the output from its stage along the pipeline."""
        if self.parts:
            several = self.batch_dim is not None and len(self.parts) > 1
            # memory of its own, for a loop may change it before the backward reads its parts
            value = torch.cat(list(self.parts), self.batch_dim or 0) if several else None
            value = (self.parts[-1].clone() if value is None else value).contiguous()
            self.parts = ()
        else:
            value = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.group is not None:
            dist.broadcast(value, group=self.group, group_src=self.owner)
        return value

    def later(self) -> LazyRows:
        """The output, which no other rank has until the loop reads it."""
        empty = torch.empty((0,) * len(self.shape), dtype=self.dtype, device=self.device)
        return LazyRows.of(empty, self)
