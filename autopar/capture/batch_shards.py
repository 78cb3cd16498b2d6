"""What of a call's arguments a rank takes, and how ranks find out that they were given alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar._torch import pytree
from autopar.capture.call import Call, TensorSpec
from autopar.common.containers import flatten
from autopar.errors import BatchError
from autopar.ir.batch_slicing import BatchSlices
from autopar.ir.placement import even_rows


@dataclass(frozen=True)
class BatchShard:
    """A rank's shard of the arguments of a call.

    Attributes:
        call: the arguments as specs.
        tensors: the tensors among them, this rank's rows.
        rows: number of rows of this rank.
        total: rows of the global batch.
        count: number of slices that the global batch is cut into.
        index: place of this slice among them.
        in_time: whether the slice is one of several micro-batches of a rank.
    """

    call: Call
    tensors: tuple[torch.Tensor, ...]
    rows: int
    global_rows: int
    num_slices: int = 1
    slice_index: int = 0
    in_time: bool = False

    @property
    def slices(self) -> BatchSlices:
        """The slices of the batch, with the index of this one."""
        return BatchSlices(self.num_slices, self.slice_index, self.global_rows, self.in_time)

    def split_micro_batches(self, count: int) -> list[BatchShard]:
        """The shard as equal micro-batches.

        Raises:
            BatchError: `count` does not divide the rows.
        """
        if count == 1:
            return [self]
        if self.rows % count or self.rows * self.num_slices != self.global_rows:
            raise BatchError(
                f"a batch of {self.global_rows} rows, {self.rows} of them on this rank, cannot be "
                f"cut into {count} equal micro-batches on each of {self.num_slices} ranks. Give a "
                f"multiple of {count * self.num_slices} rows, or other micro_batches."
            )
        rows, found = self.rows // count, []
        split = [h for h, x in zip(self.call.has_batch_dim, self.call.leaves, strict=True)
                 if isinstance(x, TensorSpec)]  # fmt: skip
        for place in range(count):
            begin = place * rows
            taken = tuple(
                x[begin : begin + rows] if has_rows else x
                for x, has_rows in zip(self.tensors, split, strict=True)
            )
            parts = iter(taken)
            leaves = tuple(
                TensorSpec.of(next(parts)) if isinstance(x, TensorSpec) else x
                for x in self.call.leaves
            )
            call = Call(leaves, self.call.structure, self.call.has_batch_dim)
            index = self.slice_index * count + place
            found.append(
                BatchShard(
                    call, taken, rows, self.global_rows, self.num_slices * count, index, True
                )
            )
        return found


def batch_shard_of(
    leaves: Sequence[Any], structure: Any, *, mode: str, rank: int, ranks: int
) -> BatchShard:
    """This rank's rows of the flattened arguments of a call.

    The number of rows is the size of dim 0 of the first tensor that has a dim; every tensor
    with that size of dim 0 is taken to run over the rows.

    Raises:
        BatchError: fewer rows than ranks.
    """
    sized = [x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
    given = sized[0] if sized else 0
    has_rows = tuple(
        isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape[0] == given for x in leaves
    )
    if not sized:
        rows, total, begin = 1, ranks, 0
    elif mode == "local" or ranks == 1:
        rows, total, begin = given, given * ranks, 0
    else:
        if given < ranks:
            raise BatchError(
                f"a batch of {given} rows cannot be split over {ranks} ranks: every rank needs a "
                f"row. Give at least {ranks} rows, drop the last small batch (drop_last=True), or "
                "run fewer ranks."
            )
        sizes = even_rows(given, ranks)
        rows, total, begin = sizes[rank], given, sum(sizes[:rank])
    taken = [
        x[begin : begin + rows] if split and rows != given else x
        for x, split in zip(leaves, has_rows, strict=True)
    ]
    specs = tuple(TensorSpec.of(x) if isinstance(x, torch.Tensor) else x for x in taken)
    tensors = tuple(x for x in taken if isinstance(x, torch.Tensor))
    return BatchShard(Call(specs, structure, has_rows), tensors, rows, total, ranks, rank)


def last_part(inputs: Any, parts: int) -> Any:
    """The last of so many parts of the rows of a batch, in the same structure.

    Raises:
        BatchError: fewer rows than parts.
    """
    leaves, structure = flatten(inputs)
    share = batch_shard_of(leaves, structure, mode="global", rank=parts - 1, ranks=parts)
    tensors = iter(share.tensors)
    taken = [next(tensors) if isinstance(x, torch.Tensor) else x for x in leaves]
    return pytree.tree_unflatten(taken, structure)
