"""Checks that all ranks got equal batches, or batches with equally many rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import BatchError, DisagreementError

MAX_SAMPLE_BYTES = 1 << 20
"""Bytes of a tensor that are hashed."""

MODULUS = 1 << 20
PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Classes of arguments with the same text on every rank."""


def batch_checksum(
    leaves: Sequence[Any], rows: int, mode: str, device: torch.device
) -> torch.Tensor:
    """The four numbers that ranks add up: checksum, its square, row count, its square."""
    check = checksum(leaves) if mode == "global" else 0
    row_count = 0 if mode == "global" else rows
    values = [check, check**2, row_count, row_count**2]
    return torch.tensor(values, dtype=torch.float64, device=device)


def checksum(leaves: Sequence[Any]) -> int:
    """A number below 2**20 that almost surely differs between different batches."""
    value = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            shape = str(tuple(leaf.shape)).encode()
            value = zlib.crc32(sampled_bytes(leaf), zlib.crc32(shape, value))
        else:
            text = repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__
            value = zlib.crc32(text.encode(), value)
    return value % MODULUS


def sampled_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, or of evenly spaced elements of a large one."""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // MAX_SAMPLE_BYTES)
    return flat[::step].contiguous().view(torch.uint8).cpu().numpy().data


def check_checksum_sum(total: torch.Tensor, ranks: int) -> None:
    """Raises on every rank if batches of data-parallel ranks do not fit the mode.

    Raises:
        DisagreementError: batches differ under batch="global".
        BatchError: row counts differ under batch="local".
    """
    check, check_squares, rows, rows_squares = (int(v) for v in total.tolist())
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


def check_model_parallel_peers(total: torch.Tensor, ranks: int) -> None:
    """Raises DisagreementError on every rank if ranks that share a model got different rows."""
    check, squares, *_ = (int(v) for v in total.tolist())
    if not _all_equal(check, squares, ranks):
        raise DisagreementError(
            f"{ranks} ranks that share one model (tp, cp, ep) were given different batches. Give "
            "all of them the same: choose rows by model.data_parallel_rank and "
            "data_parallel_size, not by the rank in the world."
        )


def _all_equal(total: int, squares: int, ranks: int) -> bool:
    """Whether numbers with this sum and sum of squares are equal (Cauchy-Schwarz)."""
    return ranks * squares == total**2
