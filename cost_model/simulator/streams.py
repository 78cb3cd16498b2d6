"""`Clock`: the streams of one rank, moved forward together.

Compute, and the first collective of each axis, run at once. While they do, compute takes
`slowdown.of_compute` times as long, and a collective `slowdown.of_communication` times. Collectives
of two axes that use the same links (both stay inside nodes, or both cross them) share these evenly.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from autopar.cost_model.cluster.interference import Slowdown
from autopar.cost_model.collectives import Transfer

COMPUTE = "compute"
_NOTHING_LEFT_S = 1e-12  # what rounding leaves of something that has ended


@dataclass(frozen=True, slots=True)
class Event:
    """Something that occupies a stream for a while.

    Attributes:
        name: of the node.
        stream: "compute", or the mesh axis that is communicated over.
        start_s: when it starts, in seconds from the start of the step.
        end_s: when it ends.
        kind: "compute", "wait", or the name of the collective.
    """

    name: str
    stream: str
    start_s: float
    end_s: float
    kind: str

    @property
    def seconds(self) -> float:
        """How long it lasts."""
        return self.end_s - self.start_s


@dataclass(slots=True)
class Flight:
    """A collective under way.

    Attributes:
        name: of the node that issues it.
        transfer: what is sent.
        left_s: seconds of it that are still to do, were it alone.
        issued_s: when it was issued, in seconds from the start of the step.
        start_s: when its axis was free for it.
        end_s: when it ended; while it is under way, when it was issued.
        on_compute: by what factor it slows compute.
        beside_compute: by what factor compute slows it.
    """

    name: str
    transfer: Transfer
    left_s: float
    issued_s: float
    start_s: float
    end_s: float
    on_compute: float
    beside_compute: float


class Clock:
    """The streams of a rank.

    Attributes:
        now: seconds since the start.
        events: what has ended, in order.
    """

    def __init__(self, slowdown: Slowdown) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self._slowdown = slowdown
        self._queues: dict[str, deque[Flight]] = {}
        self._busy = 0  # queues that are not empty

    def compute(self, name: str, seconds: float) -> None:
        """Run an operator to its end."""
        start = self.now
        if not self._busy:
            self.now += seconds
        else:
            while seconds > _NOTHING_LEFT_S:
                seconds -= self._advance(seconds)
        if self.now > start:
            self.events.append(Event(name, COMPUTE, start, self.now, COMPUTE))

    def issue(self, name: str, transfer: Transfer, seconds: float) -> Flight:
        """Put a collective at the end of its axis's queue."""
        slowdown, nbytes = self._slowdown, transfer.nbytes
        factors = slowdown.of_compute(nbytes), slowdown.of_communication(nbytes)
        now = self.now
        flight = Flight(name, transfer, seconds, now, now, now, *factors)
        if seconds > 0.0:
            queue = self._queues.setdefault(transfer.axis, deque())
            self._busy += not queue
            queue.append(flight)
        return flight

    def wait(self, name: str, flight: Flight) -> float:
        """Let compute stand still until a collective has ended; for how many seconds."""
        start = self.now
        while flight.left_s > 0.0:
            self._advance(None)
        if self.now > start:
            self.events.append(Event(name, COMPUTE, start, self.now, "wait"))
        return self.now - start

    def stall(self, name: str, seconds: float) -> float:
        """Let compute stand still for so many seconds; returns them."""
        start, end = self.now, self.now + seconds
        while self._busy and self.now < end:
            self._advance(None, end - self.now)
        self.now = max(self.now, end)
        if seconds > 0.0:
            self.events.append(Event(name, COMPUTE, start, self.now, "wait"))
        return seconds

    def _advance(self, work: float | None, most_s: float = math.inf) -> float:
        """Move to the next end of anything; the seconds of compute that were done.

        Args:
            work: what is left of the operator that runs, None if compute stands still.
            most_s: move by no more than this.
        """
        heads = [queue[0] for queue in self._queues.values() if queue]
        paces = [_pace(flight, heads, work is not None) for flight in heads]
        ends = [flight.left_s * pace for flight, pace in zip(heads, paces, strict=True)]
        own = max([flight.on_compute for flight in heads], default=1.0)
        span = min([most_s, *ends] if work is None else [most_s, *ends, work * own])
        self.now += span
        for flight, pace in zip(heads, paces, strict=True):
            flight.left_s -= span / pace
            if flight.left_s <= _NOTHING_LEFT_S:
                self._land(flight)
        return span / own

    def _land(self, flight: Flight) -> None:
        """Record the end of a collective and start the next of its axis."""
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
    """Seconds that pass for each second of a collective, among those that run at once."""
    crosses = flight.transfer.shape.nodes > 1
    sharing = sum((other.transfer.shape.nodes > 1) == crosses for other in heads)
    return sharing * (flight.beside_compute if computing else 1.0)
