"""`calibrated`: the figures of a machine, corrected by what real steps on it took.

Operators that ran take what they took, less what collectives beside them cost; those that did not
run, and collectives, keep the shape of what was known and are scaled. So a plan that was tried and
one that was not are compared at the same figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

import numpy as np
from torch import fx

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer, collective_of, is_wait, issuer
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.kernels.signature import moved_bytes, time_key
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.measurement.operator_times import OperatorTimes, Timing
from autopar.cost_model.measurement.step_replay import ReplayGroup
from autopar.cost_model.simulator.step import Simulation, simulate
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.ir.graph import TrainingGraph
from autopar.planner.machine import Machine

WAITED = 0.1
"""Part of a collective's time that compute must have waited for it, for its end to be known."""


ROUNDS = 3
"""How often the step is predicted again: how much operators and collectives slow each other down
depends on what they take."""


@dataclass(frozen=True)
class TimedCollectives:
    """What the nodes of a step took, on average, by their names.

    Attributes:
        operators: seconds of each operator and of each call that issues a collective.
        collectives: seconds of each collective, from that call to the end of the wait for it.
        waits: of that, the seconds that compute waited.
    """

    operators: Mapping[str, float]
    collectives: Mapping[str, float]
    waits: Mapping[str, float]

    @staticmethod
    def of(graph: TrainingGraph, steps: Iterable[Sequence[Event]]) -> TimedCollectives:
        """From the events of recorded, or simulated, steps of a lowered graph."""
        source = {
            node.name: made.name
            for node in graph.calls()
            if is_wait(node) and (made := issuer(node)) is not None
        }
        own: dict[str, list[float]] = {}
        sent: dict[str, list[float]] = {}
        waits: dict[str, list[float]] = {}
        for events in steps:
            issued = {e.name: e.start_s for e in events if e.stream == COMPUTE}
            for event in events:
                if event.stream != COMPUTE:
                    taken = event.end_s - issued.get(event.name, event.start_s)
                    sent.setdefault(event.name, []).append(taken)
                elif event.kind == "wait":
                    waits.setdefault(source.get(event.name, ""), []).append(event.seconds)
                else:
                    own.setdefault(event.name, []).append(event.seconds)
        return TimedCollectives(
            *({k: statistics.mean(v) for k, v in t.items()} for t in (own, sent, waits))
        )

    def together(self, ranks: ReplayGroup) -> TimedCollectives:
        """Of all ranks: operators on average, collectives without what the others were late."""
        every = ranks.gather(self)
        operators, collectives, waits = (
            [getattr(one, name) for one in every] for name in ("operators", "collectives", "waits")
        )
        return TimedCollectives(
            _joined(operators, statistics.mean), _joined(collectives, min), _joined(waits, min)
        )


@dataclass(frozen=True)
class Calibration:
    """A machine after real steps.

    Attributes:
        machine: with its figures corrected.
        seen: signatures of the operators that were timed in the steps.
        operators: by which factor operators took longer than was known, all together.
        collectives: the same for each kind of collective of which an end was seen.
    """

    machine: Machine
    seen: frozenset[str]
    operators: float
    collectives: Mapping[str, float]

    def measured(self) -> OperatorTimes:
        """The operators that were timed in the steps, alone: what is worth keeping."""
        operators = self.machine.operators
        return replace(operators, times={k: operators.times[k] for k in self.seen})


def calibrated(
    machine: Machine, graph: TrainingGraph, taken: TimedCollectives, where: str
) -> Calibration:
    """The machine as real steps show it.

    Args:
        machine: as it was known.
        graph: that ran, lowered.
        taken: by its nodes, of all ranks together.
        where: what ran, for the provenance.
    """
    found, seen, factor = machine, list[str](), 1.0
    factors = dict.fromkeys(_ended(machine, graph, taken), 1.0)
    ratios: Ratios = {}
    for _ in range(ROUNDS):
        result = simulate(graph, found.cluster, found.operators, overhead=machine.overhead)
        expected = TimedCollectives.of(graph, [result.timeline]).collectives
        for name in factors:
            if known_s := expected.get(name, 0.0):  # one that takes no time has no event
                factors[name] *= taken.collectives[name] / known_s
        ratios = _ratios(machine.cluster, graph, factors)
        cluster = _cluster(machine.cluster, ratios, f"{date.today()} in steps of {where}")
        beside = _beside(found.operators.of(graph), graph, result)
        operators, seen, factor = _operators(machine.operators, graph, taken, beside)
        found = replace(machine, cluster=cluster, operators=operators)
    kinds = {
        kind: math.exp(statistics.mean(math.log(r) for _, r in _of(ratios, kind)))
        for kind in sorted({kind for kind, _ in ratios})
    }
    return Calibration(found, frozenset(seen), factor, kinds)


def _ended(machine: Machine, graph: TrainingGraph, taken: TimedCollectives) -> list[str]:
    """The collectives of which the end was seen: they were waited for, or ended early."""
    result = simulate(graph, machine.cluster, machine.operators, overhead=machine.overhead)
    known = TimedCollectives.of(graph, [result.timeline]).collectives
    return [
        name
        for name, seconds in taken.collectives.items()
        if seconds > 0.0 and known.get(name, 0.0) > 0.0
        if taken.waits.get(name, 0.0) >= WAITED * seconds or seconds < known[name]
    ]


def _beside(known: OperatorTimes, graph: TrainingGraph, result: Simulation) -> dict[str, float]:
    """By how much collectives beside each operator slow it down."""
    plain = {node.name: _plain(known, node) for node in graph.calls() if not is_wait(node)}
    simulated = {e.name: e.seconds for e in result.timeline if e.stream == COMPUTE}
    return {k: simulated[k] / s for k, s in plain.items() if s > 0.0 and k in simulated}


def _plain(known: OperatorTimes, node: fx.Node) -> float:
    """What a node is known to take on the computing thread, with no collective beside it."""
    call = known.call_of_collective(node) if collective_of(node) is not None else None
    return (call or known.seconds(node)).seconds


def _operators(
    known: OperatorTimes, graph: TrainingGraph, taken: TimedCollectives, beside: Mapping[str, float]
) -> tuple[OperatorTimes, list[str], float]:
    """The times of operators, which of them were seen, and by what factor these took longer."""
    costs, samples = known.of(graph), dict[str, list[float]]()
    sizes: dict[str, tuple[float, int]] = {}
    before_s = after_s = 0.0
    for node in graph.calls():
        if is_wait(node) or node.name not in taken.operators:
            continue
        key, seconds = time_key(node), taken.operators[node.name] / beside.get(node.name, 1.0)
        samples.setdefault(key, []).append(seconds)
        if collective_of(node) is not None:
            sizes[key] = 0.0, 0  # a call, that says nothing of how fast operators are
            continue
        sizes[key] = flops_of(node), moved_bytes(node)
        before_s, after_s = before_s + _plain(costs, node), after_s + seconds
    factor = after_s / before_s if before_s > 0.0 else 1.0
    day = str(date.today())
    times = {key: replace(t, seconds=t.seconds * factor) for key, t in known.times.items()}
    for key, several in samples.items():
        times[key] = Timing(statistics.mean(several), *sizes[key], day, rehearsed=True)
    return replace(known, times=times), list(samples), factor


Ratios = dict[tuple[str, GroupShape], list[tuple[int, float]]]
"""By kind and groups: the bytes of messages, and how many times as long as known they took."""


def _ratios(cluster: Cluster, graph: TrainingGraph, factors: Mapping[str, float]) -> Ratios:
    found: Ratios = {}
    for node in graph.calls():
        if node.name in factors and collective_of(node) is not None:
            sent = Transfer.of(node, graph.axes, cluster.ranks_per_node)
            pair = sent.nbytes, factors[node.name]
            found.setdefault((sent.collective, sent.shape), []).append(pair)
    return found


def _of(ratios: Ratios, kind: str) -> list[tuple[int, float]]:
    return [pair for (one, _), pairs in ratios.items() if one == kind for pair in pairs]


def _cluster(cluster: Cluster, ratios: Ratios, when: str) -> Cluster:
    """The curves scaled: by what their own messages took, or others over the same groups."""
    if not ratios:
        return cluster

    def scaled(key: CurveKey, entry: Measured) -> Measured:
        own = ratios.get((key.collective, key.shape))
        pairs = own or [
            p for (_, shape), more in ratios.items() if shape == key.shape for p in more
        ]
        if not pairs:
            return entry
        kind = "measured" if own else "modelled by other collectives"
        origin = f"{kind} {when}, before {entry.provenance}"
        curve = entry.curve
        factors = _factors(pairs, curve.bytes)
        seconds = [s * f for s, f in zip(curve.seconds, factors, strict=True)]
        spread = [s * f for s, f in zip(curve.spread, factors, strict=False)]
        return Measured(Curve.smooth(curve.bytes, seconds, spread), origin, entry.version)

    curves = {key: scaled(key, entry) for key, entry in cluster.curves.items()}
    return replace(cluster, curves=curves)


def _factors(pairs: Sequence[tuple[int, float]], sizes: Sequence[int]) -> list[float]:
    """The factor at each size: between the sizes that were sent by their logarithms."""
    by_size: dict[int, list[float]] = {}
    for nbytes, ratio in pairs:
        by_size.setdefault(max(1, nbytes), []).append(ratio)
    known = sorted(by_size)
    ratios = [math.log(statistics.median(by_size[n])) for n in known]
    return np.exp(np.interp(np.log(sizes), np.log(known), ratios)).tolist()


def _joined(
    tables: Sequence[Mapping[str, float]], how: Callable[[list[float]], float]
) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: how([table[name] for table in tables if name in table]) for name in names}
