"""`sample_compute`: a piece of compute to time beside transfers; it draws no random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_SIDE = 160  # rows and columns of the multiplied matrices
_STREAMED = 1 << 18  # elements read, and written to fresh memory


def sample_compute() -> Callable[[], None]:
    """A fraction of a millisecond of compute: products and memory streams, in equal parts."""
    matrix, stream = torch.ones(_SIDE, _SIDE), torch.ones(_STREAMED)

    def run() -> None:
        torch.mm(matrix, matrix)
        torch.add(stream, stream)

    return run


def seconds_of_piece(compute: Callable[[], None], seconds: float) -> float:
    """Mean seconds of a piece of compute alone, over some seconds."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        compute()
        count += 1
    return (time.perf_counter() - start) / count


def pieces_until(compute: Callable[[], None], is_done: Callable[[], bool]) -> int:
    """Number of pieces of compute that run until something else is done, at least 1."""
    count = 0
    while not is_done():
        compute()
        count += 1
    return max(1, count)
