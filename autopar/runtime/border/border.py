"""The border of a module, which arguments, results and their gradients cross.

Under `batch="global"` the border is replicated: each of them is that of all rows, on every rank.
Under `batch="local"` it is DistributedDataParallel's: each of them is that of this rank's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar._torch import pytree
from autopar.capture.call import BatchShard
from autopar.core.common.containers import flatten
from autopar.core.ir.placement import Shard
from autopar.runtime.border.lazy_rows import ReadLater
from autopar.runtime.border.rows import Entered, OwnRows, RowLayout, ScaledGradient

Announce = Callable[[str], None]
"""Agrees with the other ranks on what this one is about to do."""


@dataclass(frozen=True)
class Border:
    """The border at one call.

    Attributes:
        shard: this rank's rows of the arguments.
        is_replicated: whether values of all rows cross it, rather than this rank's.
        sources: a rank of the world with each slice of the rows.
        averages: whether gradients of parameters are averages over ranks, as torch's data
            parallelism computes them, rather than sums.
    """

    shard: BatchShard
    is_replicated: bool
    sources: tuple[int, ...]
    averages: bool
    announce: Announce

    def enter(self, leaves: Sequence[Any]) -> BatchShard:
        """The arguments of this rank, connected with the gradients of those given."""
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in self.shard.tensors):
            return self.shard
        tensors = list(self.shard.tensors)
        for place, index in enumerate(self.shard.call.tensor_indices):
            dim = self.shard.call.row_dims[index]
            if tensors[place].requires_grad and dim is not None:
                tensors[place] = self._entered(index, leaves[index], dim)
        return replace(self.shard, tensors=tuple(tensors))

    def _entered(self, index: int, given: torch.Tensor, dim: int) -> torch.Tensor:
        if not self.is_replicated:
            # a program differentiates the loss of all rows, of which this rank's mean is a part
            return given if self.averages else Entered.apply(given, 1.0, 1 / self._weight)
        layout = self._layout(Shard(dim), f"gathers the gradient of argument {index}")
        own = OwnRows.apply(given, layout, 1.0)
        return ScaledGradient.apply(own, 1 / len(self.sources)) if self.averages else own

    def leave(self, result: Any, shards: Sequence[Shard | None] | None) -> Any:
        """The result for the loop; `shards` tell how this rank's rows lie in each leaf.

        Without `shards`, dim 0 of every tensor that has this rank's number of rows is theirs.
        """
        if not self.is_replicated:
            return result
        leaves, structure = flatten(result)
        found = [self._rows_of(leaf) for leaf in leaves] if shards is None else shards
        for index, (leaf, shard) in enumerate(zip(leaves, found, strict=False)):
            if shard is not None:
                layout = self._layout(shard, f"reads the rows of output {index}")
                # a module weighs gradients of rows by the rank's part of the batch, as for a mean
                leaves[index] = ReadLater.apply(leaf, layout, self._weight)
        return pytree.tree_unflatten(leaves, structure)

    @property
    def _weight(self) -> float:
        return self.shard.slices.rows / self.shard.rows

    def _layout(self, shard: Shard, event: str) -> RowLayout:
        slices = self.shard.slices
        return RowLayout(
            shard, slices.sizes, slices.index, self.sources, lambda: self.announce(event)
        )

    def _rows_of(self, leaf: Any) -> Shard | None:
        may_have_rows = self.shard.has_rows and isinstance(leaf, torch.Tensor) and leaf.dim() > 0
        return Shard(0) if may_have_rows and leaf.shape[0] == self.shard.rows else None
