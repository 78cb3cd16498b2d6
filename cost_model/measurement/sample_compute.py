"""`sample_compute`: a small piece of compute, to time beside transfers."""

from __future__ import annotations

from collections.abc import Callable

import torch

_SIDE = 160  # rows and columns of the multiplied matrices
_STREAMED = 1 << 18  # elements read, and written to fresh memory


def sample_compute() -> Callable[[], None]:
    """A fraction of a millisecond of compute: products and memory streams, in equal parts."""
    matrix, stream = torch.rand(_SIDE, _SIDE), torch.rand(_STREAMED)

    def run() -> None:
        torch.mm(matrix, matrix)
        torch.add(stream, stream)

    return run
