"""Starts collectives early and waits for them late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from autopar.graph import TrainingGraph
from autopar.passes.base import PassResult
from autopar.passes.bucket_collectives import gathers
from autopar.passes.collectives import results_of, starts, wait_of


@dataclass(frozen=True)
class ScheduleOverlap:
    """Prefetches gathers and waits for reductions as late as memory allows.

    Before: each collective is waited for at once. After: a gather starts when the one `prefetch`
    before it is waited for, and is waited for at its first use; a reduction is waited for when
    `in_flight` later ones have started, or at the end. The order in which collectives start is
    not changed within a kind, so that all ranks start them alike. What is neither, statistics and
    conversions between placements, is waited for at its first use. Tier: exact.

    Attributes:
        prefetch: how many gathers are under way ahead of the one needed; 0 for none.
        in_flight: how many reductions may be under way; 0 for any number.
    """

    prefetch: int = 1
    in_flight: int = 0
    tier: ClassVar[Literal["exact", "lossy"]] = "exact"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        if not any(True for _ in starts(graph)):
            return PassResult(graph, "there is no collective")
        graph = graph.copy()
        for phase in ("forward", "backward"):
            self.prefetch_gathers(graph, phase)
        self.delay_reductions(graph)
        gathered = {s for p in ("forward", "backward") for _, s in gathers(graph, p)}
        for start in list(starts(graph)):
            if start not in gathered and "gradient" not in start.meta:
                early = start.meta["phase"] == "forward"
                _sink(wait_of(start), graph.backward_start if early else None)
        return PassResult(graph)

    def prefetch_gathers(self, graph: TrainingGraph, phase: str) -> None:
        """Moves waits to first uses and starts ahead of them."""
        order = list(dict.fromkeys(start for _, start in gathers(graph, phase)))
        for start in order:
            _sink(wait_of(start))
        waits: list[fx.Node] = sorted(wait_of(start) for start in order)
        for index, done in enumerate(waits):
            ahead = index - self.prefetch
            place = waits[ahead] if ahead >= 0 else _first(graph, phase)
            issued = done.args[0]
            assert isinstance(issued, fx.Node)
            if place is not issued:
                place.prepend(issued)

    def delay_reductions(self, graph: TrainingGraph) -> None:
        """Moves waits of gradient reductions behind later starts."""
        order = [s for s in starts(graph) if "gradient" in s.meta]
        for index, start in enumerate(order):
            later = index + self.in_flight
            bound = order[later] if self.in_flight and later < len(order) else None
            _sink(wait_of(start), bound)


def _sink(done: fx.Node, bound: fx.Node | None = None) -> None:
    """Moves a wait and its results to before their first use, or before `bound`."""
    items = [item for item in results_of(done.args[0]) if item is not None]  # type: ignore[arg-type]
    uses = [user for item in items for user in item.users]
    place = min([*uses, *([bound] if bound is not None else [])])
    place.prepend(done)
    for item in items:
        place.prepend(item)


def _first(graph: TrainingGraph, phase: str) -> fx.Node:
    """The first operator of a phase."""
    if phase == "backward":
        return graph.backward_start
    return next(iter(graph.calls()))
