"""`track_allocations`: bytes that a call allocates, from torch's own allocators.

On a CPU these are the allocator's records in the order in which they come. They stand below the
dispatcher: so what a kernel allocates for itself is seen as well. On a GPU they are the
allocator's statistics.
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
    """Bytes that one call allocated.

    Attributes:
        peak: at most at once, beyond what was there before.
        kept: still there when it returned, its result included.
    """

    peak: int
    retained: int


def track_allocations(call: Callable[[], object], device: str = "cpu") -> Allocated:
    """Run a call and see what it allocates on a device, "cpu" or "cuda".

    Not seen on a CPU: what other threads than this one allocate.

    Raises:
        RuntimeError: a profiler runs already (CPU only).
    """
    return _on_gpu(call) if device == "cuda" else _on_cpu(call)


def _on_gpu(call: Callable[[], object]) -> Allocated:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    kept = torch.cuda.memory_allocated() - before
    del result
    return Allocated(torch.cuda.max_memory_allocated() - before, kept)


def _on_cpu(call: Callable[[], object]) -> Allocated:
    enable_profiler(_config())
    try:
        result = call()
    finally:
        threads = disable_profiler()
    del result
    records = [r for thread in threads for r in thread if str(r.kind()) == "memory_alloc"]
    totals = [0, *accumulate(record.cpu_memory_usage() for record in records)]
    return Allocated(max(totals), totals[-1])


def _config() -> ProfilerConfig:
    """A profiler that records memory and none of shapes, stacks, operations and modules."""
    kind = ProfilerState.CPU
    return ProfilerConfig(kind, False, True, False, False, False, ExperimentalProfilerConfig())
