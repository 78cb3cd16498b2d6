"""`track_allocations`: bytes that a call allocates, from torch's own allocators.

CPUs: the allocator's records, in order. They are below the dispatcher, so a kernel's own
allocations count. GPUs: the allocator's statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch

from autopar._torch import (
    ExperimentalProfilerConfig,
    ProfilerConfig,
    ProfilerState,
    disable_profiler,
    enable_profiler,
)


@dataclass(frozen=True)
class Allocated:
    """Bytes that one call allocated: most at once, and those that remain, its result included."""

    peak: int
    retained: int


def track_allocations(call: Callable[[], object], device: str = "cpu") -> Allocated:
    """Runs a call and counts its allocations on "cpu" or "cuda", on a CPU those of this thread.

    Raises:
        RuntimeError: a profiler is running already (CPU only).
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        retained = torch.cuda.memory_allocated() - before
        del result
        return Allocated(torch.cuda.max_memory_allocated() - before, retained)
    # Memory only: no shapes, stacks, operations or modules.
    kind, options = ProfilerState.CPU, ExperimentalProfilerConfig()
    enable_profiler(ProfilerConfig(kind, False, True, False, False, False, options))
    try:
        result = call()
    finally:
        threads = disable_profiler()
    del result
    records = [r for thread in threads for r in thread if str(r.kind()) == "memory_alloc"]
    totals = [0, *accumulate(record.cpu_memory_usage() for record in records)]
    return Allocated(max(totals), totals[-1])
