"""`ProfilerCounter`: peak tensor bytes of training steps on one rank.

It reads the total of torch's CPU allocator at each of the profiler's `[memory]` records, below the
dispatcher. The loop's thread alone makes records; the total has the blocks of all threads, such as
gloo's. Limit: tensors from before, such as batches, do not count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

UNSTEADY = 1  # first steps of each kind that do not count: they make the optimizer state

_MARK = "benchmarks.memory.step"
_ALL_THREADS = "FLAGS_caffe2_report_cpu_memory_usage"  # without it one thread's blocks count


class ProfilerCounter:
    """Counts allocations inside the context, and the peak in each marked step.

    with ProfilerCounter() as counter:
        step = build()
        for _ in range(6):
            with counter.step("training"):
                step()
    counter.peaks()  # bytes
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.steps: list[int] = []  # peak bytes of each
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> ProfilerCounter:
        gc.collect()  # what is left of others would be subtracted, if freed inside
        _count_all_threads()
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting; fill `steps` unless there is an error."""
        self._profile.__exit__(*error)
        if error[0] is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profile.export_chrome_trace(str(path))
                self.steps = _read(json.loads(path.read_text())["traceEvents"])

    def step(self, kind: str) -> record_function:
        """Mark one training step, as a context."""
        self.kinds.append(kind)
        return record_function(_MARK)

    def peaks(self) -> dict[str, list[int]]:
        """Return the peak bytes of each steady step of each kind."""
        found = {}
        for kind in dict.fromkeys(self.kinds):
            pairs = zip(self.kinds, self.steps, strict=True)
            found[kind] = [peak for name, peak in pairs if name == kind][UNSTEADY:]
        return found


def _count_all_threads() -> None:
    """Let torch's allocator keep one total over all threads; torch has no call for that."""
    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), _ALL_THREADS).value = True


def _read(events: list[dict[str, Any]]) -> list[int]:
    """Return the peaks of the marked steps of a Chrome trace, above the bytes at its start."""
    records = [event for event in events if event.get("name") == "[memory]"]
    records.sort(key=lambda event: event["ts"])
    first = records[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    times = [0.0, *(record["ts"] for record in records)]
    totals = [0, *(record["args"]["Total Allocated"] - before for record in records)]
    steps = sorted((it for it in events if it.get("name") == _MARK), key=lambda it: it["ts"])
    return [
        max(totals[bisect_left(times, it["ts"]) - 1 : bisect_right(times, it["ts"] + it["dur"])])
        for it in steps
    ]
