"""`ProfilerCounter`: peak tensor bytes of training steps on one rank.

It counts blocks of torch's CPU allocator from `build` to the end of the steps: parameters,
gradients, optimizer state, buckets, saved activations, temporaries. The profiler's `[memory]`
records are below the dispatcher, so C++ code and Inductor's kernels count too. Limits:

- Only allocations of the training loop's thread, which runs the backward on CPU, are recorded.
  Scratch of gloo's threads and workspaces of MKL and oneDNN are missing.
- A block that a gloo thread frees counts until its address is used again: up to 3 % too much, and
  more each step. Hence every step is taken to begin with the least bytes of any of its kind.
- Tensors from before, such as the batches, do not count.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

UNSTEADY = 1
"""First steps of each kind that do not count: they make the optimizer state."""

_MARK = "benchmarks.memory.step"


@dataclass(frozen=True)
class StepBytes:
    """Bytes allocated at the start of a step, and at most during it."""

    start: int
    peak: int


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
        self.steps: list[StepBytes] = []
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> ProfilerCounter:
        """Start counting from zero."""
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop counting; fill `steps` unless there is an error."""
        self._profile.__exit__(kind, error, trace)
        if error is None:
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
            least = min(step.start for step in steady)
            found[kind] = [least + step.peak - step.start for step in steady]
        return found


def _read(events: list[dict[str, Any]]) -> list[StepBytes]:
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
            steps.append(StepBytes(totals[first], max(totals[first:last])))
    return steps
