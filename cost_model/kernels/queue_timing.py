"""`QueueTimer`: times operators on a GPU, apart from the host that issues them.

Runs wait in the queue behind a kernel that only sleeps, between two events. The events tell the
seconds of the device, the clock around the calls those of the host. Each run has inputs that are
not in the L2 cache: they rotate over copies of twice its size.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar._torch import sleep_on_gpu
from autopar.core.random_inputs import integer_ranges
from autopar.cost_model.kernels.timing import bind, operator_bytes, operator_limit

_ROUNDS, _MOST_RUNS = 3, 32  # the driver queues about a thousand launches
_ATTEMPTS = 3
_CYCLES_PER_S = 3e9  # more than a GPU's clock, so that sleeps are long enough
_L2_BYTES = 64 * 2**20  # of a GPU that does not tell

Call = Callable[[], object]


@dataclass(frozen=True)
class QueuedTime:
    """Seconds of one operator on the device, and of the host that issues it."""

    device_s: float
    host_s: float


class QueueTimer:
    """Times operators on the current GPU, for about `budget_s` seconds each."""

    def __init__(self, budget_s: float = 0.02, device: str = "cuda") -> None:
        self.budget_s, self.device = budget_s, device
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._rotated = 2 * getattr(properties, "L2_cache_size", _L2_BYTES)
        self._ballast = torch.empty(self._rotated, dtype=torch.uint8, device=device)

    def times(self, nodes: Mapping[str, fx.Node]) -> dict[str, QueuedTime]:
        """Median times of each operator on random tensors like its own, by the same keys.

        Operators that cannot be run, or are too large, are left out. The caller's random
        generators do not change.
        """
        found = {}
        with torch.random.fork_rng([torch.cuda.current_device()]), torch.no_grad():
            for key, node in nodes.items():
                if operator_bytes(node) <= operator_limit(self.device):
                    timed = self._time_node(node)
                    if timed is not None:
                        found[key] = timed
        return found

    def time_call(self, calls: Sequence[Call]) -> QueuedTime:
        """Median times of calls that run in turn."""
        first = self._run(calls, 1, 0.0)[0]
        count = max(1, min(_MOST_RUNS, int(self.budget_s / _ROUNDS / max(first.device_s, 1e-9))))
        rounds = [self._behind(calls, count, first.host_s) for _ in range(_ROUNDS)]
        return QueuedTime(
            statistics.median(one.device_s for one in rounds),
            statistics.median(one.host_s for one in rounds),
        )

    def _time_node(self, node: fx.Node) -> QueuedTime | None:
        copies = 1 + math.ceil(self._rotated / max(1, operator_bytes(node)))
        for low, high in integer_ranges(node):
            with contextlib.suppress(Exception):  # operators that fail are modelled instead
                calls = [bind(node, low, high) for _ in range(min(copies, _MOST_RUNS))]
                for call in calls[:2]:  # loads kernels and fills torch's allocator
                    call()
                return self.time_call(calls)
        return None

    def _behind(self, calls: Sequence[Call], count: int, host_s: float) -> QueuedTime:
        """The times of calls that were all queued before the first ran.

        An operator that waits for the device itself is never queued. It is timed without a sleep,
        and its host's seconds are those of the device.
        """
        # A host that is slower than expected has not queued all calls when the sleep ends. Then
        # fewer calls follow a longer sleep.
        for attempt in range(_ATTEMPTS):
            timed, queued = self._run(calls, max(1, count >> attempt), host_s * 2**attempt)
            if queued:
                return timed
        timed, _ = self._run(calls, count, 0.0)
        return QueuedTime(timed.device_s, timed.device_s)

    def _run(self, calls: Sequence[Call], count: int, expected_s: float) -> tuple[QueuedTime, bool]:
        """The times of `count` calls, and whether all were queued before the first ran.

        `expected_s` are the seconds of one call on the host; 0 for no sleep before the first.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._ballast.zero_()  # evicts the cache
        torch.cuda.synchronize()
        if expected_s:
            sleep_on_gpu(int(expected_s * (count + 2) * _CYCLES_PER_S))
        begin.record()
        start = time.perf_counter()
        for turn in range(count):
            calls[turn % len(calls)]()
        host_s = time.perf_counter() - start
        end.record()
        queued = not begin.query()
        end.synchronize()
        return QueuedTime(begin.elapsed_time(end) / 1e3 / count, host_s / count), queued


def time_empty_kernel() -> float:
    """Seconds of a kernel on the device that does next to nothing."""
    tensor = torch.zeros(1, device="cuda")
    with torch.no_grad():
        return QueueTimer().time_call([tensor.zero_]).device_s
