"""`measure_storage`: times of reads and writes of files in a folder, past the page cache."""

from __future__ import annotations

import mmap
import time
from datetime import date
from pathlib import Path

import torch.distributed as dist

from autopar.common.block_storage import BlockStorage, Extent
from autopar.common.groups import cpu_group
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.host import Host
from autopar.cost_model.storage import Storage

SIZES = tuple(1 << power for power in range(16, 27, 2))
"""Sizes of transfers in bytes, 64 KiB to 64 MiB."""

QUICK_S = 1.5
"""Seconds to spend where a plan needs the curves."""


def measure_storage(folder: str, budget_s: float = QUICK_S) -> Storage:
    """Times of transfers one after another, as activations move; all ranks call this at once.

    Each rank has a file in the folder, and the files are used at once. The times are those of the
    calling rank.

    Raises:
        OffloadError: the folder cannot be written, or is full.
    """
    storage = BlockStorage(Path(folder))
    buffer = mmap.mmap(-1, SIZES[-1])
    buffer[:] = bytes(range(256)) * (len(buffer) // 256)
    extent = storage.allocate(len(buffer))
    storage.write(extent, buffer).result()  # also gives the file its blocks
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(cpu_group())
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
    return Storage(**curves, provenance=today, folder=str(folder))
