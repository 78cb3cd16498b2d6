"""`Clock`: simulated time of one rank's streams, and of the host that issues their work.

Compute and the first collective of each axis run at once. Meanwhile compute takes
`slowdown.of_compute` times as long, and a collective `slowdown.of_communication` times. Collectives
of two axes share their links evenly if both stay inside nodes, or if both cross nodes. Transfers to
files and host memory have lanes and factors of their own. Copies to the host and from it slow each
other down, but share no link with collectives.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from autopar.cost_model.cluster.interference import Slowdown
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.storage import COPIES, LANES, Storage

COMPUTE = "compute"
_ROUNDING_S = 1e-12  # remainders below this are rounding errors


@dataclass(frozen=True, slots=True)
class Event:
    """An interval on a stream, in seconds from the start of the step.

    The stream is "compute", a lane of transfers or a mesh axis. The kind is "compute", "wait", a
    collective, or a kind of transfer (see `storage.LANES`).
    """

    name: str
    stream: str
    start_s: float
    end_s: float
    kind: str

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(slots=True)
class Flight:
    """A collective that has been issued, with times in seconds from the start of the step.

    Attributes:
        left_s: remaining seconds, if it were alone.
        start_s: time in seconds at which its axis was free for it.
        end_s: time of its end in seconds; `issued_s` until then.
        on_compute: its slowdown of compute.
        beside_compute: the slowdown of it by compute.
        both_ways: the slowdown of a copy by one that moves the other way.
    """

    name: str
    transfer: Transfer
    left_s: float
    issued_s: float
    start_s: float
    end_s: float
    on_compute: float
    beside_compute: float
    both_ways: float = 1.0


class Clock:
    """The streams of a rank: `now` in seconds, and `events` in the order of their end.

    `host_s` is the time at which the host has issued everything so far; 0 on a CPU, which issues
    nothing. `idle_s` are the seconds that compute waited for it.
    """

    def __init__(self, slowdown: Slowdown) -> None:
        self.now = self.host_s = self.idle_s = 0.0
        self.events: list[Event] = []
        self._slowdown = slowdown
        self._queues: dict[str, deque[Flight]] = {}
        self._busy = 0  # number of non-empty queues

    def dispatch(self, host_s: float, *, starts: bool) -> None:
        """Lets the host issue a call; compute waits for it if it `starts` work on the device."""
        self.host_s += host_s
        if starts and self.now < self.host_s:
            self.idle_s += self.host_s - self.now
            self._pass_until(self.host_s)

    def synchronize(self) -> None:
        """Lets the host wait for compute."""
        self.host_s = max(self.host_s, self.now)

    def compute(self, name: str, seconds: float) -> None:
        start = self.now
        if not self._busy:
            self.now += seconds
        else:
            while seconds > _ROUNDING_S:
                seconds -= self._advance(seconds)
        self._record(name, start, COMPUTE)

    def issue(
        self,
        name: str,
        transfer: Transfer,
        seconds: float,
        storage: Storage | None = None,
    ) -> Flight:
        """Appends a collective to the queue of its axis, or a transfer to that of its lane.

        `storage` has the slowdowns of a transfer to a lower level of memory; None for a collective.
        """
        slowdown, nbytes = self._slowdown, transfer.nbytes
        factors: tuple[float, ...] = slowdown.of_compute(nbytes), slowdown.of_communication(nbytes)
        if storage is not None:
            factors = storage.on_compute, storage.beside_compute, storage.both_ways
        now = self.now
        flight = Flight(name, transfer, seconds, now, now, now, *factors)
        if seconds > 0.0:
            queue = self._queues.setdefault(transfer.axis, deque())
            self._busy += not queue
            queue.append(flight)
        return flight

    def wait(self, name: str, flight: Flight) -> float:
        """Stalls compute until a collective has ended; returns the seconds."""
        start = self.now
        while flight.left_s > 0.0:
            self._advance(None)
        self._record(name, start, "wait")
        return self.now - start

    def stall(self, name: str, seconds: float) -> None:
        start = self.now
        self._pass_until(start + seconds)
        self._record(name, start, "wait")

    def _pass_until(self, end: float) -> None:
        """Moves to a time while nothing is computed."""
        while self._busy and self.now < end:
            self._advance(None, end - self.now)
        self.now = max(self.now, end)

    def _record(self, name: str, start: float, kind: str) -> None:
        if self.now > start:
            self.events.append(Event(name, COMPUTE, start, self.now, kind))

    def _advance(self, work: float | None, most_s: float = math.inf) -> float:
        """Moves to the next end of anything, at most `most_s`; returns the seconds of compute done.

        `work` are the remaining seconds of the running operator; None while compute stalls.
        """
        heads = [queue[0] for queue in self._queues.values() if queue]
        paces = [_pace(flight, heads, work is not None) for flight in heads]
        ends = [flight.left_s * pace for flight, pace in zip(heads, paces, strict=True)]
        factor = max([flight.on_compute for flight in heads], default=1.0)
        span = min([most_s, *ends] if work is None else [most_s, *ends, work * factor])
        self.now += span
        for flight, pace in zip(heads, paces, strict=True):
            flight.left_s -= span / pace
            if flight.left_s <= _ROUNDING_S:
                self._finish(flight)
        return span / factor

    def _finish(self, flight: Flight) -> None:
        """Records the end of a collective and starts the next of its axis."""
        flight.left_s, flight.end_s = 0.0, self.now
        axis, kind = flight.transfer.axis, flight.transfer.collective
        self.events.append(Event(flight.name, axis, flight.start_s, self.now, kind))
        queue = self._queues[axis]
        queue.popleft()
        if queue:
            queue[0].start_s = self.now
        else:
            self._busy -= 1


def _pace(flight: Flight, heads: list[Flight], computing: bool) -> float:
    """Simulated seconds for each second of a collective, among those that run at once."""
    slower = flight.beside_compute if computing else 1.0
    if flight.transfer.collective in LANES:
        copies = sum(other.transfer.collective in COPIES for other in heads)
        meets = flight.transfer.collective in COPIES and copies > 1
        return slower * flight.both_ways if meets else slower
    crosses = flight.transfer.shape.nodes > 1
    sharing = sum(
        (other.transfer.shape.nodes > 1) == crosses and other.transfer.collective not in LANES
        for other in heads
    )
    return sharing * slower
