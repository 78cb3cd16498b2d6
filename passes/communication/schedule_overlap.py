"""Starts collectives early and waits for them late."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.passes.communication.overlap_units import AT_MARK, Half, Unit, halves, sink_waits
from autopar.passes.core.collective_ops import starts
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.plan.overlap import Overlap


@dataclass(frozen=True)
class ScheduleOverlap(Pass):
    """Issues collectives early and waits for them late, as a plan says or by two numbers.

    Before: each collective is awaited where it starts. After: a gather starts the planned number of
    stretches before its use, and the sum of a gradient starts and is awaited the planned number
    after its inputs are ready. Without a plan for the graph, a gather starts with the `prefetch`th
    gather before it. A sum is then awaited when `in_flight` later ones have started, or at the end.
    Collectives of main compute are awaited at their first use. Other compute between two
    collectives moves with the second and keeps its order. Tier: exact.

    All ranks start collectives in one order, which follows from the plan and from the sync points
    of the graph (`overlap_units`). Both are the same on all ranks.

    Attributes:
        prefetch: number of gathers in flight ahead of the one in use; 0 for none.
        in_flight: most reductions in flight; 0 for any number.
        overlaps: planned schedule of each pipeline stage.
    """

    prefetch: int = 1
    in_flight: int = 0
    overlaps: tuple[Overlap, ...] = ()

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        if not any(True for _ in starts(graph)):
            return PassResult(graph, "there is no collective")
        graph = graph.copy()
        sink_waits(graph)
        forward, backward = halves(graph)
        planned = self.overlap(graph)
        rearrange(backward, self.positions(backward, planned.regather, planned.reduce), graph)
        rearrange(forward, self.positions(forward, planned.gather, ()), graph)
        return PassResult(graph)

    def overlap(self, graph: TrainingGraph) -> Overlap:
        """The planned schedule of a graph."""
        stage = stage_of(graph)
        return next((item for item in self.overlaps if item.stage == stage), Overlap())

    def positions(
        self, half: Half, leads: Sequence[float], delays: Sequence[float]
    ) -> dict[Unit, float]:
        """The position of every unit of a half."""
        early, late = half.of("early"), half.of("late")
        found = {unit: unit.mark + AT_MARK for unit in half.of("needed")}
        if early and len(early) == len(leads):
            found |= {u: max(0.0, u.mark + AT_MARK - x) for u, x in zip(early, leads, strict=True)}
        else:
            found |= self.prefetched(half)
        if late and len(late) == len(delays):
            found |= {u: u.mark + x for u, x in zip(late, delays, strict=True)}
        else:
            found |= self.delayed(half)
        return in_order(half, found)

    def prefetched(self, half: Half) -> dict[Unit, float]:
        """A gather starts when one so many before it is needed, what follows it evenly behind."""
        needs = sorted(unit.mark for unit in half.of("needed"))
        deepest = {unit.mark: 0 for unit in half.of("early")}
        for unit in half.of("early"):
            deepest[unit.mark] = max(deepest[unit.mark], unit.level + 1)
        found = {}
        for unit in half.of("early"):
            ahead = bisect_left(needs, unit.mark) - self.prefetch
            first = needs[ahead] if ahead >= 0 else 0
            found[unit] = first + (unit.mark - first) * unit.level / deepest[unit.mark]
        return found

    def delayed(self, half: Half) -> dict[Unit, float]:
        """A sum is waited for behind later ones, as far as there are, and otherwise at the end."""
        firsts = sorted(unit.mark for unit in half.of("late") if not unit.behind)
        end = len(half.marks) - 1
        found = {}
        for unit in half.of("late"):
            ahead = unit.level if unit.start else max(self.in_flight, unit.level)
            later = bisect_left(firsts, unit.mark) + ahead
            bounded = unit.start is not None or self.in_flight > 0
            found[unit] = float(firsts[later] if bounded and later < len(firsts) else end)
            if not unit.behind:
                found[unit] = float(unit.mark)
        return found


def stage_of(graph: TrainingGraph) -> int:
    """The stage of a pipeline that a graph is of, 0 if there is none."""
    return max((node.meta.get("stage") or 0 for node in graph.calls()), default=0)


def in_order(half: Half, positions: dict[Unit, float]) -> dict[Unit, float]:
    """The positions, none in front of what a unit takes results of, nor too early or too late."""
    found: dict[Unit, float] = {}
    for unit in half.units:
        behind = (found[before] for before in unit.behind)
        at = max([positions[unit], *behind])
        found[unit] = min(at, unit.mark + AT_MARK) if unit.kind == "early" else max(at, unit.mark)
    return found


def rearrange(half: Half, positions: dict[Unit, float], graph: TrainingGraph) -> None:
    """Moves units to their positions.

    At one position gathers start first, since main compute will need them; then what has come is
    waited for, before more is sent; main compute waits last.
    """

    def key(unit: Unit) -> tuple[float, int]:
        ranks = {"early": 0, "late": 1 if unit.start is None else 2, "needed": 3}
        return positions[unit], ranks[unit.kind]

    at_end = graph.output_node
    if half.main and half.main[0].meta["phase"] == "forward":
        at_end = graph.backward_start
    for unit in _dependent(sorted(half.units, key=key)):
        place = half.marks[unit.mark] if unit.kind == "needed" else half.place(positions[unit])
        anchor: fx.Node = half.main[place] if place < len(half.main) else at_end
        for node in unit.nodes:
            anchor.prepend(node)


def _dependent(units: Sequence[Unit]) -> Iterator[Unit]:
    """The units in this order, but none in front of what it takes results of."""
    done: set[Unit] = set()

    def visit(unit: Unit) -> Iterator[Unit]:
        if unit not in done:
            for before in unit.behind:
                yield from visit(before)
            done.add(unit)
            yield unit

    for unit in units:
        yield from visit(unit)
