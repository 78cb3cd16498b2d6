"""`schedule`: start and wait of each collective, by list scheduling on the simulator's clock.

Compute runs in graph order. Before each operator, an axis that would be idle during the operator
issues the first available of these units:

1. a unit that continues an arrived collective;
2. a gather that would otherwise arrive too late;
3. a reduction of a ready gradient;
4. any gather, if the remaining messages take longer than the remaining compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import collective_of, is_wait
from autopar.core.plan.overlap import Overlap
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.simulator.streams import Clock, Flight
from autopar.passes.communication.overlap_units import AT_MARK, Half, Unit, halves, sink_waits
from autopar.passes.communication.schedule_overlap import stage_of
from autopar.passes.core.collective_ops import STARTS, message_bytes, start_reduce_scatter, wait

MARGIN = 0.5
"""Safety margin of a gather's arrival for estimation errors, as a fraction of its time."""

TICK = 1e-4
"""Distance between units issued at the same operator, in stretches."""

WINDOW = 32
"""Number of gathers that `slack` considers."""


@dataclass
class CollectiveTimes:
    """Times of a lowered collective.

    Attributes:
        before_s: seconds of compute before the issue.
        after_s: seconds of compute between arrival and results.
        sends: messages and their seconds.
    """

    before_s: float = 0.0
    after_s: float = 0.0
    sends: list[tuple[Transfer, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.sends)


NOTHING = CollectiveTimes()
Costs = dict[str, CollectiveTimes]


def _costs_of(lowered: TrainingGraph, cluster: Cluster, operators: OperatorTimes) -> Costs:
    """Times of each collective, by the name of its abstract start."""
    found: Costs = {}
    come = set[str]()
    for node in lowered.calls():
        if (name := node.meta.get("of")) is None:
            continue
        cost, slowdown = found.setdefault(name, CollectiveTimes()), cluster.slowdown
        if collective_of(node) is not None:
            called = operators.call_of_collective(node)
            called = called or operators.thread_cost(slowdown.issue_s, slowdown.provenance)
            cost.before_s += called.seconds
            sent = Transfer.of(node, lowered.axes, cluster.ranks_per_node)
            price = cluster.seconds(sent.collective, sent.nbytes, sent.shape, sent.dtype)
            cost.sends.append((sent, price.seconds))
        elif is_wait(node):
            come.add(name)
            cost.after_s += operators.thread_cost(slowdown.wait_s, slowdown.provenance).seconds
        elif name in come:
            cost.after_s += operators.seconds(node).seconds
        else:
            cost.before_s += operators.seconds(node).seconds
    return found


def schedule(
    graph: TrainingGraph,
    lowered: TrainingGraph,
    cluster: Cluster,
    operators: OperatorTimes,
    budget_bytes: int | None = None,
) -> Overlap:
    """Schedules the start and wait of each collective of a graph before `ScheduleOverlap`.

    `lowered` is the same graph under any schedule. At most `budget_bytes` are gathered ahead, in
    addition to one gather.
    """
    graph = graph.copy()
    sink_waits(graph)
    costs = _costs_of(lowered, cluster, operators)
    forward, backward = (
        _ListScheduler(h, costs, cluster, operators, budget_bytes) for h in halves(graph)
    )
    forward.run()
    backward.run()
    return Overlap(forward.leads, backward.leads, backward.delays, stage_of(graph))


@dataclass
class _ListScheduler:
    """List scheduler of the collectives of a forward or backward."""

    half: Half
    costs: Costs
    cluster: Cluster
    operators: OperatorTimes
    budget_bytes: int | None

    def __post_init__(self) -> None:
        half, self.clock = self.half, Clock(self.cluster.slowdown)
        self.seconds = [self.compute_s(node) for node in half.main]
        self.done_s = [0.0, *accumulate(self.seconds)]
        self.positions: dict[Unit, float] = {}
        self.flights: dict[fx.Node, list[Flight]] = {}
        self.position, self.index = 0.0, 0
        self.early = sorted(half.of("early"), key=lambda unit: (unit.mark, unit.level))
        self.late = half.of("late")
        self.followers = [unit for unit in self.early if unit.level]
        self.sums = [unit for unit in self.late if unit.start is not None]
        self.read = {before for unit in half.units for before in unit.behind}
        self.finishes = [  # waits that another reduction reads, or for reduce-scatters alone
            unit
            for unit in self.late
            if unit.start is None
            and (
                unit in self.read
                or all(u.start and u.start.target is start_reduce_scatter for u in unit.behind)
            )
        ]
        self.to_send = sum(self.cost(u).seconds for u in half.units if u.start is not None)

    @property
    def leads(self) -> tuple[float, ...]:
        """Stretches between the start of each gather and its first use."""
        # Distances count from marks, which all ranks and all kinds of calls share. So all ranks
        # issue collectives in one order, whatever their shapes.
        ahead = (u.mark + AT_MARK - self.positions[u] for u in self.half.of("early"))
        return tuple(max(0.0, round(x, 4)) for x in ahead)  # many units may start at one mark

    @property
    def delays(self) -> tuple[float, ...]:
        """Stretches between each gradient and its reduction, or the wait for it."""
        return tuple(round(self.positions[u] - u.mark, 4) for u in self.half.of("late"))

    def run(self) -> None:
        marks = self.half.marks
        needed = {unit.mark: unit for unit in self.half.of("needed")}
        for mark, (low, high) in enumerate(pairwise(marks)):
            self.position, self.index = float(mark), low
            self.wait_for_gather(needed.get(mark))
            for place in range(low, high):
                self.position, self.index = self.half.position(mark, place), place
                self.issue_ahead(self.seconds[place])
                self.finish_reduced()
                self.run_node(self.half.main[place], self.seconds[place])
        end = len(marks) - 1
        self.position, self.index = float(end), marks[-1]
        self.wait_for_gather(needed.get(end))
        self.drain()

    def run_node(self, node: fx.Node, seconds: float) -> None:
        if node.target in STARTS:
            cost = self.costs.get(node.name, NOTHING)
            self.clock.compute(node.name, cost.before_s)
            self.flights[node] = [self.clock.issue(node.name, *sent) for sent in cost.sends]
        elif node.target is wait:
            self.wait_for(node.args[0])  # type: ignore[arg-type]
        else:
            self.clock.compute(node.name, seconds)

    def compute_s(self, node: fx.Node) -> float:
        if node.op != "call_function" or node.target in STARTS or node.target is wait:
            return 0.0
        return self.operators.seconds(node).seconds

    # Choice of units.

    def issue_ahead(self, span_s: float) -> None:
        """Issues units that keep every axis busy for `span_s` seconds."""
        while True:
            backlog = self.backlog()
            for unit in self.candidates(span_s):
                if backlog.get(self.axis(unit), 0.0) <= span_s:
                    self.issue(unit)
                    break
            else:
                return

    def candidates(self, span_s: float) -> Iterator[Unit]:
        gather = next((u for u in self.early if u not in self.positions), None)
        sums = [u for u in self.sums if self.is_ready(u)]
        follower = next((u for u in self.followers if self.is_ready(u)), None)
        if follower is not None:
            yield follower
        # A gather of a higher level continues one that has not arrived, so it would stall compute.
        if gather is None or gather.level or not self.fits_budget(gather):
            yield from sums
            return
        own_s, between_s = self.cost(gather).seconds, self.cost(sums[0]).seconds if sums else 0.0
        if urgent := self.slack() < between_s + MARGIN * own_s + span_s:
            yield gather
        yield from sums
        if not urgent and self.to_send > self.done_s[-1] - self.done_s[self.index]:
            yield gather

    def is_ready(self, unit: Unit) -> bool:
        """Whether a unit with a start can run now without a stall."""
        done = unit in self.positions or unit.start is None
        if done or (unit.kind == "late" and unit.mark > self.position):
            return False
        return all(before in self.positions and self.has_arrived(before) for before in unit.behind)

    def has_arrived(self, unit: Unit, margin: float = 0.0) -> bool:
        """Whether a unit's collective arrived at least `margin` times its duration ago."""
        flights = self.flights.get(unit.start, []) if unit.start is not None else []
        late_s = margin * self.cost(unit).seconds
        return all(f.left_s <= 0.0 and f.end_s + late_s <= self.clock.now for f in flights)

    def slack(self) -> float:
        """Minimum seconds between arrival and use of the next gathers, if sent in order now."""
        sent_s, least = dict(self.backlog()), float("inf")
        ahead = (u for u in self.early if u not in self.positions)
        for unit, _ in zip(ahead, range(WINDOW), strict=False):
            axis = self.axis(unit)
            sent_s[axis] = sent_s.get(axis, 0.0) + self.cost(unit).seconds
            until_s = self.done_s[self.half.marks[unit.mark]] - self.done_s[self.index]
            least = min(least, until_s - sent_s[axis])
        return least

    def fits_budget(self, gather: Unit) -> bool:
        if self.budget_bytes is None or gather.start is None:
            return True
        ahead = [u for u in self.early if u in self.positions and u.mark > self.position]
        held = sum(message_bytes(u.start) for u in ahead if u.start is not None)
        return not ahead or held + message_bytes(gather.start) <= self.budget_bytes

    # Execution.

    def issue(self, unit: Unit) -> None:
        self.position += TICK
        self.positions[unit] = self.position
        for waiting in (self.sums, self.finishes):
            if unit in waiting:
                waiting.remove(unit)
        for node in unit.nodes:
            if node.target in STARTS:
                self.to_send -= self.cost(unit).seconds
            self.run_node(node, self.compute_s(node))

    def wait_for(self, start: fx.Node) -> None:
        for flight in self.flights[start]:
            self.clock.wait(start.name, flight)
        self.clock.compute(start.name, self.costs.get(start.name, NOTHING).after_s)

    def wait_for_gather(self, unit: Unit | None) -> None:
        """Awaits the gathers that compute needs next, if any."""
        if unit is None:
            return
        for before in self.predecessors(unit):
            if before not in self.positions:
                self.issue(before)
        flights = [f for u in unit.behind if u.start is not None for f in self.flights[u.start]]
        if any(flight.left_s > 0.0 for flight in flights):
            self.issue_ahead(max(self.backlog().values()))
        for before in unit.behind:
            if before.start is not None:
                self.wait_for(before.start)

    def predecessors(self, unit: Unit) -> Iterator[Unit]:
        """Predecessors of a unit, in the order of issue."""
        for before in unit.behind:
            yield from self.predecessors(before)
            yield before

    def finish_reduced(self) -> None:
        """Awaits arrived reduce-scatters, which frees unsharded gradients, and what is read."""
        for unit in list(self.finishes):
            if all(b in self.positions and self.has_arrived(b, MARGIN) for b in unit.behind):
                self.issue(unit)

    def drain(self) -> None:
        """Runs the units left after compute, in the order of arrival."""
        left = [unit for unit in self.late if unit not in self.positions]
        while left:
            open_ = [u for u in left if all(before in self.positions for before in u.behind)]
            unit = min(open_, key=self.drain_order)
            left.remove(unit)
            self.issue(unit)

    def drain_order(self, unit: Unit) -> tuple[bool, bool, float]:
        """Sort key: units without a stall first, then units that send, then by time of issue."""
        waits = not all(self.has_arrived(before) for before in unit.behind)
        issued = [f.issued_s for b in unit.behind if b.start for f in self.flights[b.start]]
        return waits, unit.start is None and unit not in self.read, max(issued, default=0.0)

    # Times.

    def cost(self, unit: Unit) -> CollectiveTimes:
        return NOTHING if unit.start is None else self.costs.get(unit.start.name, NOTHING)

    def axis(self, unit: Unit) -> str:
        sends = self.cost(unit).sends
        return sends[0][0].axis if sends else ""

    def backlog(self) -> dict[str, float]:
        """Remaining seconds of the messages in flight on each axis."""
        found: dict[str, float] = {}
        for flight in chain.from_iterable(self.flights.values()):
            if flight.left_s > 0.0:
                axis = flight.transfer.axis
                found[axis] = found.get(axis, 0.0) + flight.left_s
        return found
