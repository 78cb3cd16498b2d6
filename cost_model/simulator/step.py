"""`simulate`: time and memory of a lowered training step, without running it.

Operators run one after another on the compute stream. A collective starts once it is issued and
the stream of its axis is free. A wait stalls compute until the collective has ended. Reads and
writes of files follow one another on a stream of their own. So do copies from a GPU to host memory,
and copies from it.

The host issues all of these to a GPU, one after another: none starts before it is issued, and views
take time of the host only. The step ends when both have. The host waits for the device only where
an operator's result is needed on it. Without timings of a GPU the host takes no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.core.common.deadline import check_time
from autopar.core.exposure import Exposure, apportion
from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.messages import collective_of, is_storage_wait, is_wait, issuer, transfer_of
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.cost import Cost
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.memory.peak import Memory, simulate_memory
from autopar.cost_model.simulator.streams import Clock, Event, Flight
from autopar.cost_model.storage import COPIES, DOWN, LANES
from autopar.formatting import duration

WORTH_NAMING = 0.05
"""Least part of a step in which the device waits for its host, for a note."""


@dataclass(frozen=True)
class Simulation:
    """One predicted step: forward and backward, without the optimizer's step.

    `compute_s` and `communication_s` are the seconds of all operators and collectives, each alone;
    `exposed_s` is step_s - compute_s - idle_s.

    Attributes:
        waits: seconds that compute stalls, by kind of collective.
        exposures: the stall for each collective by cause, in the order of waits.
        memory_curve: start of each of `memory.nodes` in seconds, and the bytes that then exist.
        timeline: all events, in the order of their end.
        provenance: number of measured, imported and modelled times.
        host_s: seconds of the host to issue a step, 0 if unknown or on a CPU.
        idle_s: seconds that the device waits for the host.
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
    host_s: float = 0.0
    idle_s: float = 0.0

    def notes(self) -> tuple[str, ...]:
        """Notes for a plan on a device that waits for its host."""
        if self.idle_s < WORTH_NAMING * self.step_s:
            return ()
        times = f"{duration(self.idle_s)} of {duration(self.step_s)}"
        return (
            f"the device waits for Python for {times}: more rows a rank, or a backend that fuses "
            "operators, would use it better",
        )


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
    check_time()
    run = _Run(graph, cluster, operators.of(graph))
    check_time()
    memory = simulate_memory(graph, overhead)
    step_s = run.now
    idle_s = run.clock.idle_s + step_s - run.clock.now
    starts = [*run.starts, step_s]  # the last is the optimizer's step
    return Simulation(
        step_s=step_s,
        forward_s=run.forward_s,
        backward_s=step_s - run.forward_s,
        compute_s=run.compute_s,
        communication_s=run.communication_s,
        exposed_s=max(0.0, step_s - run.compute_s - idle_s),
        waits=run.waits,
        exposures=tuple(run.exposures),
        memory=memory,
        memory_curve=tuple(zip(starts, memory.curve, strict=True)),
        timeline=tuple(run.clock.events),
        provenance=dict(run.sources),
        host_s=run.host_s,
        idle_s=idle_s,
    )


def half_seconds(
    graph: TrainingGraph, clusters: Iterable[Cluster], operators: OperatorTimes
) -> list[tuple[float, float]]:
    """Seconds of forward and backward as `simulate` predicts them, on each cluster."""
    graph_times = operators.of(graph)
    runs = (_Run(graph, cluster, graph_times) for cluster in clusters)
    return [(run.forward_s, run.now - run.forward_s) for run in runs]


def reads_device(node: fx.Node) -> bool:
    """Whether the host waits for an operator: it copies between devices, or has unknown shapes."""
    if any(tag in getattr(node.target, "tags", ()) for tag in _BY_VALUE):
        return True
    kinds = {t.device.type for n in (node, *node.all_input_nodes) for t in tensors(n)}
    copies = getattr(node.target, "overloadpacket", None) in _COPIES
    return copies and len(kinds) > 1 and not node.kwargs.get("non_blocking")


_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy, torch.ops.aten.copy_)
_BY_VALUE = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


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
        self.forward_s = self.compute_s = self.communication_s = self.host_s = 0.0
        backward_start = graph.backward_start
        for node in graph.graph.nodes:
            if node is backward_start:
                self.forward_s = self.now
            if node.op == "call_function":
                self.starts.append(self.clock.now)
                if collective_of(node) is not None:
                    self._issue(node)
                elif is_wait(node) and (source := issuer(node)) is not None:
                    self._wait(node, source)
                elif (kind := transfer_of(node)) is not None:
                    self._move(node, kind)
                elif is_storage_wait(node):
                    self._land(node)
                else:
                    self._compute(node.name, cost := operators.seconds(node))
                    if cost.host_s and reads_device(node):
                        self.clock.synchronize()
                self.ends[node] = self.clock.now
        for source, flight in self.flights.items():
            if flight.left_s > 0.0:
                self._expose(source, self.clock.wait("end", flight))

    @property
    def now(self) -> float:
        """When both the device and the host have done all so far."""
        return max(self.clock.now, self.clock.host_s)

    def _compute(self, name: str, cost: Cost, *, starts: bool = False) -> None:
        if cost.host_s or self.clock.host_s:
            self.host_s += cost.host_s
            self.clock.dispatch(cost.host_s, starts=starts or cost.seconds > 0.0)
        self.sources[cost.kind] += 1
        self.compute_s += cost.seconds
        self.clock.compute(name, cost.seconds)

    def _issue(self, node: fx.Node) -> None:
        """Starts a collective. Its price includes the call that issues it."""
        slowdown = self.cluster.slowdown
        issue = self.operators.thread_cost(slowdown.issue_s, slowdown.provenance)
        self._compute(node.name, self.operators.call_of_collective(node) or issue, starts=True)
        transfer = Transfer.of(node, self.graph.axes, self.cluster.ranks_per_node)
        price = self.cluster.price(transfer)
        self.sources[price.kind] += 1
        self.communication_s += price.seconds
        self.prices[node] = max(0.0, price.seconds - issue.seconds)
        self.flights[node] = self.clock.issue(node.name, transfer, self.prices[node])

    def _move(self, node: fx.Node, kind: str) -> None:
        """Starts to move a value to a lower level of memory, or back. A copy is a call."""
        if kind in COPIES:
            self._compute(node.name, self.operators.seconds(node), starts=True)
        moved = node.args[0] if kind in DOWN else node
        nbytes = sum(map(tensor_bytes, tensors(moved)))  # type: ignore[arg-type]
        storage = self.cluster.transfers(kind)
        price = storage.seconds(kind, nbytes)
        self.sources[price.kind] += 1
        self.prices[node] = price.seconds
        transfer = Transfer(kind, LANES[kind], nbytes, GroupShape(1, 1), "uint8")
        self.flights[node] = self.clock.issue(node.name, transfer, price.seconds, storage)

    def _land(self, node: fx.Node) -> None:
        """Stalls until a transfer has ended. The wait for a copy is a call."""
        begun = _begun(node)
        flight = self.flights[begun]
        if flight.transfer.collective in COPIES:
            self._compute(node.name, self.operators.seconds(node))
        self._expose(begun, self.clock.wait(node.name, flight))

    def _wait(self, node: fx.Node, source: fx.Node) -> None:
        """Stalls until a collective has ended and late ranks have come.

        Prices are of ranks that start together. The replayed wait for an empty collective gives
        the lateness of other ranks, less the exposed part of the collective's own latency. Where an
        empty collective would have ended before, that time passes beside the rest of this one.
        """
        flight, slowdown, late_s = self.flights[source], self.cluster.slowdown, 0.0
        call = self.operators.thread_cost(slowdown.wait_s, slowdown.provenance)
        self.clock.dispatch(0.0, starts=True)
        since_s = self.clock.now - flight.issued_s
        waited_s = self.clock.wait(node.name, flight)
        replayed = self.operators.call_of_collective(node)
        if replayed is None:
            self._compute(node.name, call)
        else:
            self.sources[replayed.kind] += 1
            empty = self.cluster.seconds("all_reduce", 8, flight.transfer.shape).seconds
            own_s = waited_s if since_s > empty else empty - since_s
            late_s = max(0.0, replayed.seconds - own_s)
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


def _begun(wait: fx.Node) -> fx.Node:
    """The transfer to or from a lower level of memory that a wait is for."""
    begun = wait.args[0]
    assert isinstance(begun, fx.Node)
    return begun
