"""What of a call's arguments a rank takes, and how ranks find out that they were given alike."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar._torch import pytree
from autopar.capture.call import Call, TensorSpec
from autopar.common.containers import flatten
from autopar.errors import BatchError, DisagreementError
from autopar.ir.batch_slicing import BatchSlices
from autopar.ir.placement import even_rows

SAMPLE_BYTES = 1 << 20
MODULUS = 1 << 20
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Arguments whose text is the same on ranks that are given the same."""


@dataclass(frozen=True)
class BatchShard:
    """A rank's share of the arguments of a call.

    Attributes:
        call: the arguments as specs.
        tensors: the tensors among them, this rank's rows.
        rows: rows of this rank.
        total: rows of the global batch.
        count: number of slices that the global batch is cut into.
        index: place of this slice among them.
        in_time: whether the slice is one of several micro-batches of a rank.
    """

    call: Call
    tensors: tuple[torch.Tensor, ...]
    rows: int
    total: int
    count: int = 1
    index: int = 0
    in_time: bool = False

    @property
    def slices(self) -> BatchSlices:
        """The slices of the batch, and which of them this is."""
        return BatchSlices(self.count, self.index, self.total, self.in_time)

    def micro_batches(self, count: int) -> list[BatchShard]:
        """The share cut into as many equal parts.

        Raises:
            BatchError: its rows cannot be cut so.
        """
        if count == 1:
            return [self]
        if self.rows % count or self.rows * self.count != self.total:
            raise BatchError(
                f"a batch of {self.total} rows, {self.rows} of them on this rank, cannot be cut "
                f"into {count} equal micro-batches on each of {self.count} ranks. Give a number "
                f"of rows that is a multiple of {count * self.count}, or other micro_batches."
            )
        rows, found = self.rows // count, []
        split = [h for h, x in zip(self.call.has_rows, self.call.leaves, strict=True)
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
            call = Call(leaves, self.call.structure, self.call.has_rows)
            index = self.index * count + place
            found.append(BatchShard(call, taken, rows, self.total, self.count * count, index, True))
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


def batch_checksum(
    leaves: Sequence[Any], rows: int, mode: str, device: torch.device
) -> torch.Tensor:
    """What the ranks add up to find out whether they agree: sums and sums of squares."""
    check = checksum(leaves) if mode == "global" else 0
    row_count = 0 if mode == "global" else rows
    values = [check, check**2, row_count, row_count**2]
    return torch.tensor(values, dtype=torch.float64, device=device)


def checksum(leaves: Sequence[Any]) -> int:
    """A number below 2**20 that differs, almost surely, between different batches."""
    value = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            data = leaf.detach().reshape(-1)
            step = max(1, data.numel() * data.element_size() // SAMPLE_BYTES)
            part = data[::step].contiguous().view(torch.uint8).cpu().numpy()
            value = zlib.crc32(part.data, zlib.crc32(str(tuple(leaf.shape)).encode(), value))
        else:
            text = repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__
            value = zlib.crc32(text.encode(), value)
    return value % MODULUS


def check_checksum_sum(verdict: torch.Tensor, ranks: int, mode: str) -> None:
    """Raises on every rank alike if the ranks were not given what they must be.

    n numbers are equal exactly if n times the sum of their squares is the square of their sum.

    Raises:
        DisagreementError: under batch="global", ranks were given different batches.
        BatchError: under batch="local", ranks brought different numbers of rows.
    """
    check, check_squares, rows, rows_squares = (int(v) for v in verdict.tolist())
    if not _all_equal(check, check_squares, ranks):
        raise DisagreementError(
            "the ranks were given different batches, but batch='global' means that every rank is "
            "given the same one and takes its own rows. Seed the sampler alike on all ranks, or "
            "use batch='local' and let each rank bring its rows."
        )
    if not _all_equal(rows, rows_squares, ranks):
        raise BatchError(
            f"the ranks brought different numbers of rows ({rows} in all over {ranks} ranks). "
            "With batch='local' every rank must bring as many: drop or pad the last batch "
            "(DistributedSampler does), or use batch='global'."
        )


def check_model_parallel_peers(verdict: torch.Tensor, ranks: int) -> None:
    """Raises on every rank alike if ranks that share a model were not given the same rows.

    Raises:
        DisagreementError: they were not.
    """
    check, squares, *_ = (int(v) for v in verdict.tolist())
    if not _all_equal(check, squares, ranks):
        raise DisagreementError(
            f"{ranks} ranks that share one model (tp, cp, ep) were given different batches. Give "
            "all of them the same: choose rows by model.data_parallel_rank and "
            "data_parallel_size, not by the rank in the world."
        )


def _all_equal(total: int, squares: int, ranks: int) -> bool:
    """Whether numbers of this sum, and sum of squares, are all equal: then only they are."""
    return ranks * squares == total**2
