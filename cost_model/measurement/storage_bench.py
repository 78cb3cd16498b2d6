"""`measure_storage`: times of reads and writes of files in a folder, past the page cache.

Compute and transfers are also timed at once: the threads of transfers need a core, too.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch.distributed as dist

from autopar.common.block_storage import BlockStorage, Extent
from autopar.common.groups import cpu_group
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.host import Host
from autopar.cost_model.measurement.sample_compute import sample_compute
from autopar.cost_model.storage import Storage

SIZES = tuple(1 << power for power in range(16, 27, 2))
"""Sizes of transfers in bytes, 64 KiB to 64 MiB."""

QUICK_S = 1.5
"""Seconds to spend where a plan needs the curves."""

_TRIALS = 5
_MOVED, _MOVES = 4 << 20, 4  # bytes of a transfer beside compute, and transfers in a trial


def measure_storage(folder: str, budget_s: float = QUICK_S) -> Storage:
    """Times of transfers one after another, as activations move; all ranks call this at once.

    Each rank has a file in the folder, and the files are used at once. The times are those of the
    calling rank. `budget_s` is for transfers alone; half a second more goes to compute beside them.

    Raises:
        OffloadError: the folder cannot be written, or is full.
    """
    storage = BlockStorage(Path(folder))
    buffer = mmap.mmap(-1, SIZES[-1])
    buffer[:] = bytes(range(256)) * (len(buffer) // 256)
    extent = storage.allocate(len(buffer))
    storage.write(extent, buffer).result()  # also gives the file its blocks
    _line_up()
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
    factors = _factors(storage, Extent(extent.offset, _MOVED), buffer)
    return Storage(curves["write"], curves["read"], today, str(folder), *factors)


def _factors(storage: BlockStorage, extent: Extent, buffer: mmap.mmap) -> tuple[float, float]:
    """The slowdowns of compute and of transfers by each other."""
    compute, trials = sample_compute(), []
    for _ in range(_TRIALS):
        _line_up()
        quiet_s, _ = _timed(storage, extent, buffer)
        _line_up()
        piece_s = _piece_s(compute, quiet_s)
        _line_up()
        both_s, pieces = _timed(storage, extent, buffer, compute)
        trials.append((both_s / (pieces * piece_s), both_s / quiet_s))
    compute_by, transfers_by = map(statistics.median, zip(*trials, strict=True))
    return max(1.0, compute_by), max(1.0, transfers_by)


def _timed(
    storage: BlockStorage,
    extent: Extent,
    buffer: mmap.mmap,
    compute: Callable[[], None] | None = None,
) -> tuple[float, int]:
    """Seconds of some writes and then reads, and the pieces of compute that ran beside them."""
    start, pieces = time.perf_counter(), 0
    for _ in range(_MOVES):
        storage.write(extent, buffer)
    *_, last = [storage.read(extent, buffer) for _ in range(_MOVES)]  # after the last write
    while compute is not None and not last.done():
        compute()
        pieces += 1
    last.result()
    return time.perf_counter() - start, max(1, pieces)


def _piece_s(compute: Callable[[], None], seconds: float) -> float:
    """Mean seconds of a piece of compute alone, over some seconds."""
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        compute()
        count += 1
    return (time.perf_counter() - start) / count


def _line_up() -> None:
    """Waits for the other ranks, which use their files too."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(cpu_group())
