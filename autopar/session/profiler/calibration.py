"""`calibrated`: corrects the times of a machine by recorded steps.

Recorded operators get their recorded times, without the slowdown by concurrent collectives. Times
of all other operators, and of collectives, are scaled. The planner thus compares recorded plans and
others by the same figures.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain

import numpy as np
from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import collective_of, is_wait, issuer
from autopar.core.ir.signature import moved_bytes, time_key
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.step_replay import ReplayGroup
from autopar.cost_model.measurement.timing_context import Timing
from autopar.cost_model.simulator.step import Simulation, simulate
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.planner.machine import Machine

WAITED = 0.1
"""Minimum stall, as a fraction of a collective's time, for the collective's end to be known."""

ROUNDS = 3
"""Number of fixed-point iterations over times and mutual slowdowns."""

Ratios = dict[tuple[str, GroupShape], list[tuple[int, float]]]
"""Message sizes in bytes and ratios of recorded to known time, by kind and process group."""


@dataclass(frozen=True)
class TimedCollectives:
    """Mean times of the nodes of a step, by name.

    Attributes:
        operators: time of each operator and of each call that issues a collective, in seconds; on
            a GPU only of operators that were queued, so that no launch is in it.
        collectives: time of each collective from its call to the end of its wait, in seconds.
        waits: stall of compute for each collective, in seconds.
    """

    operators: Mapping[str, float]
    collectives: Mapping[str, float]
    waits: Mapping[str, float]

    @staticmethod
    def of(graph: TrainingGraph, steps: Iterable[Sequence[Event]]) -> TimedCollectives:
        """Times from the events of recorded or simulated steps of a lowered graph."""
        source = issuers(graph)
        own, sent, waits = (defaultdict[str, list[float]](list) for _ in range(3))
        for events in steps:
            issued = {e.name: e.start_s for e in events if e.stream == COMPUTE}
            for event in events:
                if event.stream != COMPUTE:
                    sent[event.name].append(event.end_s - issued.get(event.name, event.start_s))
                elif event.kind == "wait":
                    waits[source.get(event.name, "")].append(event.seconds)
                elif event.kind == COMPUTE:
                    own[event.name].append(event.seconds)
        return TimedCollectives(
            *({k: statistics.mean(v) for k, v in t.items()} for t in (own, sent, waits))
        )

    def together(self, ranks: ReplayGroup) -> TimedCollectives:
        """Means of operators over ranks, and minima of collectives to exclude late ranks."""
        every: list[TimedCollectives] = ranks.gather(self)
        return TimedCollectives(
            _joined([one.operators for one in every], statistics.mean),
            _joined([one.collectives for one in every], min),
            _joined([one.waits for one in every], min),
        )


@dataclass(frozen=True)
class Calibration:
    """A machine corrected by recorded steps.

    Attributes:
        machine: machine with corrected times.
        seen: signatures of recorded operators.
        operators: ratio of recorded to known total time of operators.
        collectives: ratio of recorded to known time, for each kind of collective with a known end.
    """

    machine: Machine
    seen: frozenset[str]
    operators: float
    collectives: Mapping[str, float]

    def measured(self) -> OperatorTimes:
        """Times of the recorded operators only."""
        operators = self.machine.operators
        return replace(operators, times={k: operators.times[k] for k in self.seen})


def calibrated(
    machine: Machine, graph: TrainingGraph, taken: TimedCollectives, where: str
) -> Calibration:
    """Corrects a machine by recorded times of a lowered graph over all ranks.

    The provenance names `where`, the model.
    """
    found, seen, factor, ratios = machine, list[str](), 1.0, Ratios()
    result = simulated(graph, machine)
    known = TimedCollectives.of(graph, [result.timeline]).collectives
    factors = {  # of collectives with a known end: compute stalled, or they took less than known
        name: 1.0
        for name, seconds in taken.collectives.items()
        if seconds > 0.0 and known.get(name, 0.0) > 0.0
        if taken.waits.get(name, 0.0) >= WAITED * seconds or seconds < known[name]
    }
    for _ in range(ROUNDS):
        known = TimedCollectives.of(graph, [result.timeline]).collectives
        for name in factors:
            if known_s := known.get(name, 0.0):  # collectives without duration have no event
                factors[name] *= taken.collectives[name] / known_s
        ratios = _ratios(machine.cluster, graph, factors)
        cluster = _cluster(machine.cluster, ratios, f"{date.today()} in steps of {where}")
        beside = _beside(found.operators.of(graph), graph, result)
        operators, seen, factor = _operators(machine.operators, graph, taken, beside)
        found = replace(machine, cluster=cluster, operators=operators)
        result = simulated(graph, found)
    logs = defaultdict[str, list[float]](list)
    for (kind, _), pairs in sorted(ratios.items()):
        logs[kind] += [math.log(ratio) for _, ratio in pairs]
    kinds = {kind: math.exp(statistics.mean(each)) for kind, each in logs.items()}
    return Calibration(found, frozenset(seen), factor, kinds)


def simulated(graph: TrainingGraph, machine: Machine) -> Simulation:
    """A simulated step of a lowered graph on a machine."""
    return simulate(graph, machine.cluster, machine.operators, overhead=machine.overhead)


def issuers(graph: TrainingGraph) -> dict[str, str]:
    """Node name of the collective of each wait."""
    waits = [node for node in graph.calls() if is_wait(node)]
    return {node.name: made.name for node in waits if (made := issuer(node)) is not None}


def _beside(known: OperatorTimes, graph: TrainingGraph, result: Simulation) -> dict[str, float]:
    """Slowdown of each operator by concurrent collectives."""
    plain = {node.name: _plain(known, node) for node in graph.calls() if not is_wait(node)}
    slowed = {e.name: e.seconds for e in result.timeline if e.stream == COMPUTE}
    return {k: slowed[k] / s for k, s in plain.items() if s > 0.0 and k in slowed}


def _plain(known: OperatorTimes, node: fx.Node) -> float:
    """Known time of a node on the compute stream, without concurrent collectives."""
    call = known.call_of_collective(node) if collective_of(node) is not None else None
    return (call or known.seconds(node)).seconds


def _operators(
    known: OperatorTimes, graph: TrainingGraph, taken: TimedCollectives, beside: Mapping[str, float]
) -> tuple[OperatorTimes, list[str], float]:
    """Times of operators, signatures of recorded ones, and their ratio to known times."""
    costs, samples = known.of(graph), defaultdict[str, list[float]](list)
    sizes: dict[str, tuple[float, int]] = {}
    before_s = after_s = 0.0
    for node in graph.calls():
        if is_wait(node) or node.name not in taken.operators:
            continue
        key, seconds = time_key(node), taken.operators[node.name] / beside.get(node.name, 1.0)
        samples[key].append(seconds)
        if collective_of(node) is not None:
            sizes[key] = 0.0, 0  # call of a collective, not an operator
            continue
        sizes[key] = flops_of(node), moved_bytes(node)
        before_s, after_s = before_s + _plain(costs, node), after_s + seconds
    factor = after_s / before_s if before_s > 0.0 else 1.0
    times = {key: replace(t, seconds=t.seconds * factor) for key, t in known.times.items()}
    for key, several in samples.items():
        mean_s = statistics.mean(several)
        host_s = known.times[key].host_s if key in known.times else 0.0
        times[key] = Timing(mean_s, *sizes[key], str(date.today()), True, host_s)
    return replace(known, times=times), list(samples), factor


def _ratios(cluster: Cluster, graph: TrainingGraph, factors: Mapping[str, float]) -> Ratios:
    found: Ratios = {}
    for node in graph.calls():
        if node.name in factors and collective_of(node) is not None:
            sent = Transfer.of(node, graph.axes, cluster.ranks_per_node)
            pair = sent.nbytes, factors[node.name]
            found.setdefault((sent.collective, sent.shape), []).append(pair)
    return found


def _cluster(cluster: Cluster, ratios: Ratios, when: str) -> Cluster:
    """Cluster with curves scaled by the ratios of their kind, or of others on the same group."""
    if not ratios:
        return cluster

    def scaled(key: CurveKey, entry: Measured) -> Measured:
        own = ratios.get((key.collective, key.shape))
        others = (more for (_, shape), more in ratios.items() if shape == key.shape)
        pairs = own or list(chain.from_iterable(others))
        if not pairs:
            return entry
        kind = "measured" if own else "modelled by other collectives"
        curve, factors = entry.curve, _factors(pairs, entry.curve.bytes)
        seconds = [s * f for s, f in zip(curve.seconds, factors, strict=True)]
        spread = [s * f for s, f in zip(curve.spread, factors, strict=False)]
        scaled_curve = Curve.smooth(curve.bytes, seconds, spread)
        return Measured(scaled_curve, f"{kind} {when}, before {entry.provenance}", entry.version)

    return replace(cluster, curves={key: scaled(key, e) for key, e in cluster.curves.items()})


def _factors(pairs: Sequence[tuple[int, float]], sizes: Sequence[int]) -> list[float]:
    """Ratio at each size, interpolated in the logarithms of size and ratio."""
    by_size = defaultdict[int, list[float]](list)
    for nbytes, ratio in pairs:
        by_size[max(1, nbytes)].append(ratio)
    known = sorted(by_size)
    ratios = [math.log(statistics.median(by_size[n])) for n in known]
    return np.exp(np.interp(np.log(sizes), np.log(known), ratios)).tolist()


def _joined(
    tables: Sequence[Mapping[str, float]], how: Callable[[list[float]], float]
) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: how([table[name] for table in tables if name in table]) for name in names}
