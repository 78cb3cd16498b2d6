"""`ProfilerCounter`: peak tensor bytes of training steps on one rank.

It counts blocks of torch's CPU allocator by the profiler's `[memory]` records, below the
dispatcher. Limits: only allocations of the training loop's thread are recorded, and tensors from
before, such as batches, do not count. A block that another thread frees, such as
gloo's or one in which Python collects garbage, counts until its address is used again. So every
step is taken to begin with the least bytes of any of its kind.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

UNSTEADY = 1  # first steps of each kind that do not count: they make the optimizer state

_MARK = "benchmarks.memory.step"


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
        self.steps: list[tuple[int, int]] = []  # bytes at the start, and at most
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> ProfilerCounter:
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
        """Return the peak bytes of each steady step of each kind, counted from the same start."""
        found = {}
        for kind in dict.fromkeys(self.kinds):
            pairs = zip(self.kinds, self.steps, strict=True)
            steady = [step for name, step in pairs if name == kind][UNSTEADY:]
            least = min(start for start, _ in steady)
            found[kind] = [least + peak - start for start, peak in steady]
        return found


def _read(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the marked steps of a Chrome trace.

    Only freed blocks that were allocated inside count, unlike in the profiler's own total.
    """
    events = [event for event in events if event.get("name") in {_MARK, "[memory]"}]
    events.sort(key=lambda event: event["ts"])
    blocks: dict[int, int] = {}
    times, totals = [0.0], [0]
    for event in events:
        if event["name"] == "[memory]":
            address, size = event["args"]["Addr"], max(event["args"]["Bytes"], 0)
            times.append(event["ts"])
            totals.append(totals[-1] - blocks.pop(address, 0) + size)
            blocks[address] = size
    steps = []
    for event in events:
        if event["name"] == _MARK:
            first = bisect_left(times, event["ts"]) - 1
            last = bisect_right(times, event["ts"] + event["dur"])
            steps.append((totals[first], max(totals[first:last])))
    return steps
