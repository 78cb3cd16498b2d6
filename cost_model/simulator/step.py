"""`simulate`: time and memory of a lowered training step, without running it.

Operators run one after another on the compute stream. A collective starts once it is issued and
the stream of its axis is free. A wait stalls compute until the collective has ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    """One predicted step: forward and backward, without the optimizer's step.

    `compute_s` and `communication_s` are the seconds of all operators and collectives, each alone;
    `exposed_s` is step_s - compute_s.

    Attributes:
        waits: seconds that compute stalls, by kind of collective.
        exposures: the stall for each collective by cause, in the order of waits.
        memory_curve: start of each of `memory.nodes` in seconds, and the bytes that then exist.
        timeline: all events, in the order of their end.
        provenance: number of measured, imported and modelled times.
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
    """Predicts one training step of a rank from its lowered graph.

    Collectives are named by mesh axis. `overhead` is as for `simulate_memory`.
    """
    run = _Run(graph, cluster, operators.of(graph))
    memory = simulate_memory(graph, overhead)
    step_s = run.clock.now
    starts = [*run.starts, step_s]  # the last is the optimizer's step
    return Simulation(
        step_s=step_s,
        forward_s=run.forward_s,
        backward_s=step_s - run.forward_s,
        compute_s=run.compute_s,
        communication_s=run.communication_s,
        exposed_s=max(0.0, step_s - run.compute_s),
        waits=run.waits,
        exposures=tuple(run.exposures),
        memory=memory,
        memory_curve=tuple(zip(starts, memory.curve, strict=True)),
        timeline=tuple(run.clock.events),
        provenance=dict(run.sources),
    )


def half_seconds(
    graph: TrainingGraph, clusters: Iterable[Cluster], operators: OperatorTimes
) -> list[tuple[float, float]]:
    """Seconds of forward and backward as `simulate` predicts them, on each cluster."""
    graph_times = operators.of(graph)
    runs = (_Run(graph, cluster, graph_times) for cluster in clusters)
    return [(run.forward_s, run.clock.now - run.forward_s) for run in runs]


class _Run:
    """A simulated step; the attributes are those of `Simulation`, or by node.

    `prices` has the seconds of each collective alone, after the call that issues it.
    """

    def __init__(self, graph: TrainingGraph, cluster: Cluster, operators: OperatorTimes) -> None:
        self.graph, self.cluster, self.operators = graph, cluster, operators
        self.clock = Clock(cluster.slowdown)
        self.sources: Counter[str] = Counter()
        self.waits: dict[str, float] = {}
        self.flights: dict[fx.Node, Flight] = {}
        self.exposures: list[Exposure] = []
        self.ends: dict[fx.Node, float] = {}
        self.prices: dict[fx.Node, float] = {}
        self.starts: list[float] = []
        self.forward_s = self.compute_s = self.communication_s = 0.0
        backward_start = graph.backward_start
        for node in graph.graph.nodes:
            if node is backward_start:
                self.forward_s = self.clock.now
            if node.op == "call_function":
                self.starts.append(self.clock.now)
                if collective_of(node) is not None:
                    self._issue(node)
                elif is_wait(node) and (source := issuer(node)) is not None:
                    self._wait(node, source)
                else:
                    self._compute(node.name, operators.seconds(node))
                self.ends[node] = self.clock.now
        for source, flight in self.flights.items():
            if flight.left_s > 0.0:
                self._expose(source, self.clock.wait("end", flight))

    def _compute(self, name: str, cost: Cost) -> None:
        self.sources[cost.kind] += 1
        self.compute_s += cost.seconds
        self.clock.compute(name, cost.seconds)

    def _issue(self, node: fx.Node) -> None:
        """Starts a collective. Its price includes the call that issues it."""
        slowdown = self.cluster.slowdown
        call = self.operators.call_of_collective(node)
        self._compute(node.name, call or Cost(slowdown.issue_s, slowdown.provenance))
        transfer = Transfer.of(node, self.graph.axes, self.cluster.ranks_per_node)
        price = self.cluster.price(transfer)
        self.sources[price.kind] += 1
        self.communication_s += price.seconds
        self.prices[node] = max(0.0, price.seconds - slowdown.issue_s)
        self.flights[node] = self.clock.issue(node.name, transfer, self.prices[node])

    def _wait(self, node: fx.Node, source: fx.Node) -> None:
        """Stalls until a collective has ended and late ranks have come.

        Prices are of ranks that start together. The replayed wait for an empty collective gives
        the lateness of other ranks, less the exposed part of the collective's own latency.
        """
        flight, slowdown, late_s = self.flights[source], self.cluster.slowdown, 0.0
        since_s = self.clock.now - flight.issued_s
        waited_s = self.clock.wait(node.name, flight)
        replayed = self.operators.call_of_collective(node)
        if replayed is None:
            self._compute(node.name, Cost(slowdown.wait_s, slowdown.provenance))
        else:
            self.sources[replayed.kind] += 1
            empty = self.cluster.seconds("all_reduce", 8, flight.transfer.shape).seconds
            late_s = max(0.0, replayed.seconds - max(0.0, empty - since_s))
            self.clock.stall(node.name, late_s)
        self._expose(source, waited_s, late_s)

    def _expose(self, source: fx.Node, waited_s: float, late_s: float = 0.0) -> None:
        flight, price_s = self.flights[source], self.prices[source]
        transfer = flight.transfer
        exposed_s = waited_s + late_s
        kind, axis = transfer.collective, transfer.axis
        self.waits[kind] = self.waits.get(kind, 0.0) + exposed_s
        parts = 0.0, 0.0, 0.0
        if exposed_s > 0.0:
            ready_s = self._ready_s(source)
            busy_s = self._busy_s(flight, ready_s)
            parts = apportion(
                exposed_s,
                delayed_s=busy_s + flight.end_s - flight.issued_s - price_s,
                postponed_s=flight.issued_s - ready_s - busy_s,
                late_s=late_s,
            )
        block = source.meta.get("block") or ""
        item = Exposure(source.name, block, kind, axis, transfer.nbytes, price_s, *parts)
        self.exposures.append(item)

    def _busy_s(self, flight: Flight, ready_s: float) -> float:
        """Seconds between `ready_s` and the issue of a collective in which its axis was busy."""
        axis, issued_s = flight.transfer.axis, flight.issued_s
        others = (other for other in self.flights.values() if other.transfer.axis == axis)
        spans = (min(f.end_s, issued_s) - max(f.start_s, ready_s) for f in others)
        return sum(span for span in spans if span > 0.0)

    def _ready_s(self, source: fx.Node) -> float:
        """When a collective could have been issued: its inputs existed, copies included."""
        copied_s, pending, ready_s = 0.0, [source], self.forward_s
        origin = source.meta.get("of")
        while pending:
            for node in pending.pop().all_input_nodes:
                if origin is not None and node.meta.get("of") == origin:
                    copied_s += self.operators.seconds(node).seconds
                    pending.append(node)
                else:
                    ready_s = max(ready_s, self.ends.get(node, 0.0))
        return ready_s + copied_s
