"""`simulate`: how long a step takes and what memory it needs, without running it.

Operators run one after another on the compute stream. A collective starts when it has been issued
and the stream of its axis is free; a wait blocks compute until it has ended (see `streams`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer, collective_of, is_wait, issuer
from autopar.cost_model.cost import Cost
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.memory.peak import Memory, simulate_memory
from autopar.cost_model.simulator.exposure import Exposure, apportion
from autopar.cost_model.simulator.streams import Clock, Event, Flight
from autopar.ir.graph import TrainingGraph


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
        waits: seconds that compute stands still for each kind of collective.
        exposures: how much of each collective that is, and why, in the order of waits.
        memory: the peak and its parts.
        memory_curve: when each of `memory.nodes` starts, in seconds, and the bytes that then exist.
        timeline: what runs when, in order of the end.
        provenance: how many of the times are measured, imported and modelled.
    """

    step_s: float
    forward_s: float
    backward_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    waits: Mapping[str, float]
    exposures: tuple[Exposure, ...]
    memory: Memory
    memory_curve: tuple[tuple[float, int], ...]
    timeline: tuple[Event, ...]
    provenance: Mapping[str, int]


def simulate(
    graph: TrainingGraph,
    cluster: Cluster,
    operators: OperatorTimes,
    *,
    overhead: Overhead | None = None,
) -> Simulation:
    """Predict one training step of a rank.

    Args:
        graph: a lowered graph: operators and functional collectives named by mesh axis.
        cluster: the times of collectives.
        operators: the times of operators.
        overhead: what is allocated beside the graph's tensors; see `simulate_memory`.
    """
    run = _Run(graph, cluster, operators.of(graph))
    forward_s = 0.0
    starts: list[float] = []
    first_backward = graph.backward_start
    for node in graph.graph.nodes:
        if node is first_backward:
            forward_s = run.begun_s = run.clock.now
        if node.op == "call_function":
            starts.append(run.clock.now)
            run.step(node)
    run.finish()
    memory = simulate_memory(graph, overhead)
    step_s = run.clock.now
    starts.append(step_s)  # the optimizer's step
    return Simulation(
        step_s=step_s,
        forward_s=forward_s,
        backward_s=step_s - forward_s,
        compute_s=run.compute_s,
        communication_s=run.communication_s,
        exposed_s=max(0.0, step_s - run.compute_s),
        waits=dict(run.waits),
        exposures=tuple(run.exposures),
        memory=memory,
        memory_curve=tuple(zip(starts, memory.curve, strict=True)),
        timeline=tuple(run.clock.events),
        provenance=dict(run.sources),
    )


def half_seconds(
    graph: TrainingGraph, clusters: Iterable[Cluster], operators: OperatorTimes
) -> list[tuple[float, float]]:
    """Seconds of forward and backward as `simulate` has them, on each cluster."""
    own, first_backward, found = operators.of(graph), graph.backward_start, []
    for cluster in clusters:
        run, forward_s = _Run(graph, cluster, own), 0.0
        for node in graph.graph.nodes:
            if node is first_backward:
                forward_s = run.begun_s = run.clock.now
            if node.op == "call_function":
                run.step(node)
        run.finish()
        found.append((forward_s, run.clock.now - forward_s))
    return found


@dataclass
class _Run:
    """A step under way."""

    graph: TrainingGraph
    cluster: Cluster
    operators: OperatorTimes
    sources: Counter[str] = field(default_factory=Counter)
    waits: dict[str, float] = field(default_factory=dict)
    issued: dict[fx.Node, Flight] = field(default_factory=dict)
    exposures: list[Exposure] = field(default_factory=list)
    ends: dict[fx.Node, float] = field(default_factory=dict)
    prices: dict[fx.Node, float] = field(default_factory=dict)
    begun_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0

    def __post_init__(self) -> None:
        self.clock = Clock(self.cluster.slowdown)

    def step(self, node: fx.Node) -> None:
        """Run one node."""
        if collective_of(node) is not None:
            self.issue(node)
        elif is_wait(node) and (source := issuer(node)) is not None:
            self.wait(node, source)
        else:
            self.compute(node.name, self.operators.seconds(node))
        self.ends[node] = self.clock.now

    def compute(self, name: str, cost: Cost) -> None:
        """Keep the computing thread for some time."""
        self.sources[cost.kind] += 1
        self.compute_s += cost.seconds
        self.clock.compute(name, cost.seconds)

    def issue(self, node: fx.Node) -> None:
        """Start a collective, whose price counts from the call that issues it."""
        slowdown = self.cluster.slowdown
        call = self.operators.call_of_collective(node)
        call = call or Cost(slowdown.issue_s, slowdown.provenance)
        self.compute(node.name, call)
        sent = Transfer.of(node, self.graph.axes, self.cluster.ranks_per_node)
        price = self.cluster.price(sent)
        self.sources[price.kind] += 1
        self.communication_s += price.seconds
        rest = self.prices[node] = max(0.0, price.seconds - slowdown.issue_s)
        self.issued[node] = self.clock.issue(node.name, sent, rest)

    def wait(self, node: fx.Node, source: fx.Node) -> None:
        """Stand still until a collective has ended, and for ranks that are late.

        Prices are of ranks that start together. A rehearsed wait for an empty collective tells
        how late they come, when its own latency, as far as it was not hidden, is taken off.
        """
        flight, slowdown, late_s = self.issued[source], self.cluster.slowdown, 0.0
        since_s = self.clock.now - flight.issued_s
        waited_s = self.clock.wait(node.name, flight)
        rehearsed = self.operators.call_of_collective(node)
        if rehearsed is None:
            self.compute(node.name, Cost(slowdown.wait_s, slowdown.provenance))
        else:
            self.sources[rehearsed.kind] += 1
            empty = self.cluster.seconds("all_reduce", 8, flight.transfer.shape).seconds
            late_s = max(0.0, rehearsed.seconds - max(0.0, empty - since_s))
            self.clock.stall(node.name, late_s)
        self.expose(source, waited_s, late_s)

    def expose(self, source: fx.Node, waited_s: float, late_s: float = 0.0) -> None:
        """Record what compute stood still for a collective, and why."""
        flight = self.issued[source]
        sent = flight.transfer
        exposed_s = waited_s + late_s
        self.waits[sent.collective] = self.waits.get(sent.collective, 0.0) + exposed_s
        parts = 0.0, 0.0, 0.0
        if exposed_s > 0.0:
            ready_s = self.ready_s(source)
            busy_s = self.busy_s(flight, ready_s)
            parts = apportion(
                exposed_s,
                delayed_s=busy_s + flight.end_s - flight.issued_s - self.prices[source],
                held_s=flight.issued_s - ready_s - busy_s,
                late_s=late_s,
            )
        block, seconds = source.meta.get("block") or "", self.prices[source]
        kind, axis, nbytes = sent.collective, sent.axis, sent.nbytes
        item = Exposure(source.name, block, kind, axis, nbytes, seconds, *parts)
        self.exposures.append(item)

    def busy_s(self, flight: Flight, ready_s: float) -> float:
        """For how long its axis was busy between when it could have been issued and when it was."""
        axis, issued_s = flight.transfer.axis, flight.issued_s
        others = (other for other in self.issued.values() if other.transfer.axis == axis)
        spans = (min(f.end_s, issued_s) - max(f.start_s, ready_s) for f in others)
        return sum(span for span in spans if span > 0.0)

    def ready_s(self, source: fx.Node) -> float:
        """When a collective could have been issued: what it sends was there, copies made."""
        copied_s, todo, ready_s = 0.0, [source], self.begun_s
        own = source.meta.get("of")
        while todo:
            for node in todo.pop().all_input_nodes:
                if own is not None and node.meta.get("of") == own:
                    copied_s += self.operators.seconds(node).seconds
                    todo.append(node)
                else:
                    ready_s = max(ready_s, self.ends.get(node, 0.0))
        return ready_s + copied_s

    def finish(self) -> None:
        """Nothing is under way when a step ends."""
        for source, flight in self.issued.items():
            if flight.left_s > 0.0:
                self.expose(source, self.clock.wait("end", flight))
