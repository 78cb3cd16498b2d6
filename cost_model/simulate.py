"""`simulate`: how long a step takes and what memory it needs, without running it.

Operators run one after another on the compute stream. A collective starts when it has been issued
and the stream of its axis is free; a wait blocks compute until it has ended. Where compute and
communication use the same cores (`cluster.overlap` < 1) they slow each other down.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import Transfer, collective_of, is_wait
from autopar.cost_model.memory import Memory, simulate_memory
from autopar.cost_model.operators import OperatorTimes
from autopar.graph import TrainingGraph

COMPUTE = "compute"


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


@dataclass(frozen=True)
class Simulation:
    """One predicted step: forward and backward, without the optimizer's own step.

    Attributes:
        step_s: seconds of the whole.
        forward_s: seconds until the backward starts.
        backward_s: the rest.
        compute_s: seconds of all operators, alone.
        communication_s: seconds of all collectives, alone.
        exposed_s: what communication adds to compute: step_s - compute_s.
        memory: the peak and its parts.
        timeline: what runs when, in order of the end.
        provenance: how many of the times are measured, imported and modelled.
    """

    step_s: float
    forward_s: float
    backward_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    memory: Memory
    timeline: tuple[Event, ...]
    provenance: Mapping[str, int]


def simulate(
    graph: TrainingGraph,
    cluster: Cluster,
    operators: OperatorTimes,
    *,
    optimizer_state_ratio: float = 2.0,
) -> Simulation:
    """Predict one training step of a rank.

    Args:
        graph: a lowered graph: operators and functional collectives named by mesh axis.
        cluster: the times of collectives.
        operators: the times of operators.
        optimizer_state_ratio: bytes of optimizer state for each byte of trained parameter.
    """
    clock = Clock(cluster.overlap)
    sources: Counter[str] = Counter()
    issued: dict[fx.Node, Flight] = {}
    compute_s = communication_s = forward_s = 0.0
    start = graph.backward_start
    for node in graph.graph.nodes:
        if node is start:
            forward_s = clock.now
        if node.op != "call_function":
            continue
        cost = operators.seconds(node)
        sources[cost.kind] += 1
        compute_s += cost.seconds
        clock.compute(node.name, cost.seconds)
        if collective_of(node) is not None:
            transfer = Transfer.of(node, graph.axes, cluster.ranks_per_node)
            price = cluster.seconds(
                transfer.collective, transfer.nbytes, transfer.shape, transfer.dtype
            )
            sources[price.kind] += 1
            communication_s += price.seconds
            issued[node] = clock.issue(node.name, transfer, price.seconds)
        elif is_wait(node) and (flight := _flight(node, issued)) is not None:
            clock.wait(node.name, flight)
    for flight in issued.values():
        clock.wait("end", flight)
    return Simulation(
        step_s=clock.now,
        forward_s=forward_s,
        backward_s=clock.now - forward_s,
        compute_s=compute_s,
        communication_s=communication_s,
        exposed_s=max(0.0, clock.now - compute_s),
        memory=simulate_memory(graph, optimizer_state_ratio=optimizer_state_ratio),
        timeline=tuple(clock.events),
        provenance=dict(sources),
    )


def _flight(wait: fx.Node, issued: Mapping[fx.Node, Flight]) -> Flight | None:
    """What a wait waits for, found through views and elements of tuples."""
    source = wait.args[0]
    while isinstance(source, fx.Node) and source not in issued:
        source = source.args[0] if source.args else None
    return issued[source] if isinstance(source, fx.Node) else None


@dataclass(slots=True)
class Flight:
    """A collective under way: `left_s` seconds of it are still to do, were it alone."""

    name: str
    transfer: Transfer
    left_s: float
    start_s: float = 0.0


class Clock:
    """The streams of a rank, moved forward together.

    Everything that runs at once, compute and the first collective of each axis, progresses at the
    same rate: with n of them, 1 / (1 + (1 - overlap) (n - 1)). For compute of c seconds beside
    one collective of m that makes c + m - overlap x min(c, m), which is how overlap is measured.

    Attributes:
        now: seconds since the start.
        events: what has ended, in order.
    """

    def __init__(self, overlap: float) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self._clash = 1.0 - overlap
        self._queues: dict[str, deque[Flight]] = {}
        self._busy = 0  # queues that are not empty

    def compute(self, name: str, seconds: float) -> None:
        """Run an operator to its end."""
        start = self.now
        if not self._busy:
            self.now += seconds
        else:
            while seconds > 0.0:
                seconds -= self._advance(seconds)
        if self.now > start:
            self.events.append(Event(name, COMPUTE, start, self.now, "compute"))

    def issue(self, name: str, transfer: Transfer, seconds: float) -> Flight:
        """Put a collective at the end of its axis's queue."""
        flight = Flight(name, transfer, seconds, self.now)
        if seconds > 0.0:
            queue = self._queues.setdefault(transfer.axis, deque())
            self._busy += not queue
            queue.append(flight)
        return flight

    def wait(self, name: str, flight: Flight) -> None:
        """Let compute stand still until a collective has ended."""
        start = self.now
        while flight.left_s > 0.0:
            self._advance(None)
        if self.now > start:
            self.events.append(Event(name, COMPUTE, start, self.now, "wait"))

    def _advance(self, work: float | None) -> float:
        """Move to the next end of anything; the seconds of progress that each thing made.

        Args:
            work: what is left of the operator that runs, None if compute stands still.
        """
        heads = [queue[0] for queue in self._queues.values() if queue]
        running = len(heads) + (work is not None)
        step = min([flight.left_s for flight in heads] + ([] if work is None else [work]))
        self.now += step * (1.0 + self._clash * (running - 1))
        for flight in heads:
            flight.left_s -= step
            if flight.left_s <= 0.0:
                self._land(flight)
        return step

    def _land(self, flight: Flight) -> None:
        """Record the end of a collective and start the next of its axis."""
        axis = flight.transfer.axis
        kind = flight.transfer.collective
        self.events.append(Event(flight.name, axis, flight.start_s, self.now, kind))
        queue = self._queues[axis]
        queue.popleft()
        if queue:
            queue[0].start_s = self.now
        else:
            self._busy -= 1
