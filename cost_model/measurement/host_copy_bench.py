"""`measure_host`: times of copies between a GPU and pinned host memory.

Work waits in its streams behind a kernel that only sleeps, so that all of it begins at once.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from datetime import date

import torch

from autopar._torch import sleep_on_gpu
from autopar.core.ir.messages import FROM_HOST, TO_HOST
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.host import Host
from autopar.cost_model.measurement.storage_bench import QUICK_S, SIZES, line_up
from autopar.cost_model.storage import COPIES, Storage

COMPUTE = "compute"
"""Stream of compute beside copies."""

_CYCLES = 3_000_000  # of the sleep before timed work: a millisecond at least
_TRIALS, _COPIED = 5, 4  # trials of each factor, and copies each way in one
_SIDE, _STREAMED = 2048, 1 << 25  # rows of a product, and elements of a memory stream


class HostLink:
    """Buffers on a GPU and in pinned host memory, and the streams between them.

    Attributes:
        streams: one for each kind of copy, and one for compute.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = {name: torch.cuda.Stream(device) for name in (*COPIES, COMPUTE)}
        size, kind = SIZES[-1], torch.uint8
        self._near = {name: torch.zeros(size, dtype=kind, device=device) for name in COPIES}
        self._host = {name: torch.zeros(size, dtype=kind, pin_memory=True) for name in COPIES}
        self._matrix = torch.ones(_SIDE, _SIDE, device=device)
        self._stream = torch.ones(_STREAMED, device=device)
        self._product, self._total = map(torch.empty_like, (self._matrix, self._stream))

    def copy(self, kind: str, nbytes: int) -> None:
        """Issues a copy of some bytes."""
        near, host = self._near[kind][:nbytes], self._host[kind][:nbytes]
        target, source = (host, near) if kind == TO_HOST else (near, host)
        target.copy_(source, non_blocking=True)

    def compute(self) -> None:
        """Issues a product and a memory stream, about a millisecond of both."""
        torch.mm(self._matrix, self._matrix, out=self._product)
        torch.add(self._stream, self._stream, out=self._total)


Work = tuple[str, int]
"""The name of a stream, and bytes of a copy; of compute, any number."""


def measure_host(device: torch.device, budget_s: float = QUICK_S) -> Storage:
    """Times of copies each way, and their slowdowns; all ranks call this at once.

    The times are those of the calling rank. `budget_s` are seconds for copies alone; those at once
    and beside compute take about one second more.
    """
    link = HostLink(device)
    for name in link.streams:
        _timed(link, [(name, SIZES[-1])])  # the first call takes longer
    line_up()
    samples: dict[str, dict[int, list[float]]] = {
        kind: {size: [] for size in SIZES} for kind in COPIES
    }
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or not samples[FROM_HOST][SIZES[-1]]:
        for size in SIZES:
            for kind in COPIES:
                samples[kind][size] += _timed(link, [(kind, size)])
    curves = {kind: Curve.fit(times) for kind, times in samples.items()}
    trials = [(*_beside_compute(link), _both_ways(link)) for _ in range(_TRIALS)]
    factors = [max(1.0, statistics.median(each)) for each in zip(*trials, strict=True)]
    today = f"measured {date.today()} on {Host.here().name}"
    return Storage(curves[TO_HOST], curves[FROM_HOST], today, "", *factors)


def _both_ways(link: HostLink) -> float:
    """The slowdown of copies by others that move the other way.

    Once the quicker direction has ended, the other one goes on alone.
    """
    copies: dict[str, list[Work]] = {kind: [(kind, SIZES[-1])] * _COPIED for kind in COPIES}
    line_up()
    alone = sorted(seconds for works in copies.values() for seconds in _timed(link, works))
    line_up()
    pairs = zip(*copies.values(), strict=True)
    both_s = max(_timed(link, [work for pair in pairs for work in pair]))
    return (both_s - (alone[1] - alone[0])) / alone[0]


def _beside_compute(link: HostLink) -> tuple[float, float]:
    """The slowdown of compute by copies, and of copies by compute.

    Each is timed within more of the other, issued before it.
    """
    factors = []
    for kind in COPIES:
        copies: list[Work] = [(kind, SIZES[-1])] * _COPIED
        line_up()
        (copied_s,) = _timed(link, copies)
        (computed_s,) = _timed(link, [(COMPUTE, 1)] * _COPIED)
        pieces = copied_s / (computed_s / _COPIED)
        few, many = max(1, int(pieces / 2)), math.ceil(pieces * 2)
        (few_s,) = _timed(link, [(COMPUTE, 1)] * few)
        line_up()
        _, slowed_s = _timed(link, [*copies, *[(COMPUTE, 1)] * few])
        line_up()
        _, beside_s = _timed(link, [*[(COMPUTE, 1)] * many, *copies])
        factors.append((slowed_s / few_s, beside_s / copied_s))
    on_compute, beside_compute = map(statistics.mean, zip(*factors, strict=True))
    return on_compute, beside_compute


def _timed(link: HostLink, works: Sequence[Work]) -> list[float]:
    """Seconds until each stream has done its work, in the order of their first work."""
    sleep_on_gpu(_CYCLES)
    start = torch.cuda.Event(enable_timing=True)
    start.record()
    streams = {name: link.streams[name] for name, _ in works}
    for stream in streams.values():
        stream.wait_event(start)
    for name, nbytes in works:
        with torch.cuda.stream(streams[name]):
            if name == COMPUTE:
                link.compute()
            else:
                link.copy(name, nbytes)
    ends = [torch.cuda.Event(enable_timing=True) for _ in streams]
    for end, stream in zip(ends, streams.values(), strict=True):
        end.record(stream)
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for end in ends]
