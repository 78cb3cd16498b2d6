"""`measure_storage`: times of reads and writes of files in a folder, past the page cache.

Compute and transfers are also timed at once: the threads of transfers need a core, too.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.core.common.block_storage import BlockStorage, Extent
from autopar.core.common.groups import cpu_group
from autopar.core.operators.offload import empty_pages
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.host import Host
from autopar.cost_model.measurement.sample_compute import (
    pieces_until,
    sample_compute,
    seconds_of_piece,
)
from autopar.cost_model.storage import Storage

SIZES = tuple(1 << power for power in range(16, 27, 2))
"""Sizes of transfers in bytes, 64 KiB to 64 MiB."""

QUICK_S = 1.5
"""Seconds to spend where a plan needs the curves."""

_TRIALS = 9
_MOVED, _MOVES = 1 << 20, 48  # bytes of a transfer beside compute, and transfers in a trial


def measure_storage(folder: str, budget_s: float = QUICK_S) -> Storage:
    """Times of transfers one after another, as activations move; all ranks call this at once.

    Each rank has a file in the folder, and the files are used at once. The times are those of the
    calling rank. `budget_s` is for transfers alone; those beside compute take two seconds more.

    Raises:
        OffloadError: the folder cannot be written, or is full.
    """
    storage = BlockStorage(Path(folder))
    buffer = mmap.mmap(-1, SIZES[-1])
    buffer[:] = bytes(range(256)) * (len(buffer) // 256)
    extent = storage.allocate(len(buffer))
    storage.write(extent, buffer).result()  # also gives the file its blocks
    line_up()
    samples: dict[str, dict[int, list[float]]] = {
        kind: {size: [] for size in SIZES} for kind in ("write", "read")
    }
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or not samples["read"][SIZES[-1]]:
        for size in SIZES:
            part = Extent(extent.offset, size)
            for kind in samples:
                start = time.perf_counter()
                getattr(storage, kind)(part, buffer).result()
                samples[kind][size].append(time.perf_counter() - start)
    curves = {kind: Curve.fit(times) for kind, times in samples.items()}
    today = f"measured {date.today()} on {Host.here().name}"
    return Storage(curves["write"], curves["read"], today, str(folder), *_factors(storage))


def _factors(storage: BlockStorage) -> tuple[float, float]:
    """The slowdowns of compute and of transfers by each other."""
    extents = [storage.allocate(_MOVED) for _ in range(_MOVES)]
    value = torch.ones(_MOVED, dtype=torch.uint8)
    compute, trials = sample_compute(), []
    _timed(storage, extents, value)
    for _ in range(_TRIALS):
        line_up()
        quiet_s, _ = _timed(storage, extents, value)
        line_up()
        piece_s = seconds_of_piece(compute, quiet_s)
        line_up()
        both_s, pieces = _timed(storage, extents, value, compute)
        trials.append((both_s / (pieces * piece_s), both_s / quiet_s))
    compute_by, transfers_by = map(statistics.median, zip(*trials, strict=True))
    return max(1.0, compute_by), max(1.0, transfers_by)


def _timed(
    storage: BlockStorage,
    extents: Sequence[Extent],
    value: torch.Tensor,
    compute: Callable[[], None] | None = None,
) -> tuple[float, int]:
    """Seconds to write a value and then read it, and the pieces of compute that ran beside.

    As in a step it is written from memory of torch, and read into new memory.
    """
    start, pieces = time.perf_counter(), 1
    for extent in extents:
        storage.write(extent, value.numpy().data)
    memory = [empty_pages(extent.size) for extent in extents]
    pairs = zip(extents, memory, strict=True)
    reads = [storage.read(extent, pages.numpy().data) for extent, pages in pairs]
    if compute is not None:
        pieces = pieces_until(compute, lambda: all(read.done() for read in reads))
    for read in reads:
        read.result()
    return time.perf_counter() - start, pieces


def line_up() -> None:
    """Waits for the other ranks, which measure too."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(cpu_group())
