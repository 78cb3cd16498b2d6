"""Where nothing fits: how much is missing, and what would make a plan fit, by planning with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any, TypeVar

from autopar.common.checks import MAX_RANKS
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import AutoparError, Change, OutOfMemoryError
from autopar.formatting import human_bytes, memory_text
from autopar.planner.search.fixed_mesh import PlanningProblem, cap_of
from autopar.report.plan import Plan

MakePlan = Callable[[PlanningProblem], Plan]
"""The fastest plan that fits."""

Replan = Callable[[int, int], Plan]
"""The answer for so many times as many ranks, and for the rows of the batch divided by so much."""

STATES = ("parameters", "gradients", "optimizer")
"""What of a rank's memory does not depend on the rows that it is given."""

MOST_PLANS, MOST_CHANGES = 7, 3
"""How many times is planned again at most, and after how many changes that help no more."""


T = TypeVar("T")


def memoize_by_strategy(find: Callable[[PlanningProblem], T]) -> Callable[[PlanningProblem], T]:
    """What is captured and measured for a question, once for all caps that it is asked under."""
    known: dict[tuple[str, int], T] = {}

    def found(problem: PlanningProblem) -> T:
        key = str(problem.strategy), problem.world_size
        if key not in known:
            known[key] = find(problem)
        return known[key]

    return found


@dataclass(frozen=True)
class Suggestion:
    """A change that may help.

    Attributes:
        what: in words.
        how: what to write.
        plan: plans with it.
        states: whether it lessens what a rank holds of parameters, gradients and states.
        activations: whether it lessens the rest.
    """

    what: str
    how: str
    plan: Callable[[], Plan]
    states: bool = False
    activations: bool = False

    def may_help(self, memory: Mapping[str, int], cap: int) -> bool:
        """Whether what it does not lessen fits, of bytes by category at the peak."""
        states = sum(memory.get(kind, 0) for kind in STATES)
        rest = sum(memory.values()) - states
        return (self.states or states <= cap) and (self.activations or rest <= cap)


def plan_or_advise(
    problem: PlanningProblem, answer: MakePlan, elsewhere: Replan | None = None
) -> Plan:
    """The answer; or why there is none, with changes that would give one.

    Live ranks call this at once; they all see the same plans and errors.

    Args:
        problem: what is asked.
        answer: answers it, and others.
        elsewhere: answers it for other ranks and rows, where that can be told.

    Raises:
        OutOfMemoryError: nothing fits; with the bytes that suffice and what else would help.
    """
    try:
        return answer(problem)
    except OutOfMemoryError as failure:
        cap = cap_of(problem, problem.cluster) or failure.cap
        if cap is None:
            raise
        raise _OomAdvisor(problem, answer, elsewhere, cap).explained(failure) from None


def on_more_ranks(problem: PlanningProblem, times: int) -> PlanningProblem:
    """The question for so many times as many ranks of the same kind.

    Raises:
        ClusterError: what these would do must be measured.
    """
    cluster, ranks = problem.cluster, problem.world_size * times
    assert cluster is not None
    if not cluster.curves and cluster.topology is None:
        cluster = Cluster.default(ranks, cluster.device)
    elif ranks > cluster.world_size:
        cluster = cluster.of_nodes(-(-ranks // cluster.ranks_per_node))
    return replace(problem, world_size=ranks, cluster=cluster)


class _OomAdvisor:
    def __init__(
        self, problem: PlanningProblem, answer: MakePlan, elsewhere: Replan | None, cap: int
    ) -> None:
        self.problem, self.answer, self.elsewhere = problem, answer, elsewhere
        self.cap, self.left = cap, MOST_PLANS
        self.found: list[Change] = []

    def explained(self, failure: OutOfMemoryError) -> OutOfMemoryError:
        """The failure with what is missing by category, and what would help."""
        smallest = self.with_room(failure.shortfall)
        if smallest is None or smallest.prediction is None:
            return failure
        cost, what = smallest.prediction, "more memory on each rank"
        short, gaps = cost.needed_bytes - self.cap, cost.needed_bytes - sum(cost.memory.values())
        memory = {**cost.memory, "gaps between them": max(0, gaps)}
        self.look_for_changes(memory)
        how = f"memory={cost.needed_bytes}"
        changes = (*self.found, Change(what, how, cost.step_s, cost.needed_bytes))
        return OutOfMemoryError(
            f"nothing fits under {human_bytes(self.cap)} per rank: the smallest plan "
            f"({smallest.name}) needs {human_bytes(short)} more ({short} bytes). Its peak is "
            f"{memory_text(memory)}. What would help, each planned again: "
            f"{'; '.join(map(_said, changes))}.",
            short,
            memory,
            changes,
            self.cap,
        )

    def with_room(self, short: int) -> Plan | None:
        """The plan that fits with the least more memory: a mesh may need more than its states."""
        cap = self.cap
        while self.left > MOST_CHANGES:
            cap += short
            found = self.planned(partial(self.answer, replace(self.problem, memory=cap)))
            if isinstance(found, Plan):
                return found
            if found is None:
                break
            short = found.shortfall
        return None

    def look_for_changes(self, memory: Mapping[str, int]) -> None:
        """Finds which remedies help; they may depend on what was found before."""
        same, other = self.same_batch(memory), self.other_batch_or_ranks(memory)
        for remedy in chain(self.same_graphs(), same, other):
            if not self.left or len(self.found) == MOST_CHANGES:
                return
            plan = self.planned(remedy.plan) if remedy.may_help(memory, self.cap) else None
            if isinstance(plan, Plan) and (cost := plan.prediction) is not None:
                change = Change(remedy.what, remedy.how, cost.step_s, cost.needed_bytes)
                self.found.append(change)

    def planned(self, plan: Callable[[], Plan]) -> Plan | OutOfMemoryError | None:
        """One further plan, or why nothing fits; None if it cannot be."""
        self.left -= 1
        try:
            return plan()
        except OutOfMemoryError as failure:
            return failure
        except AutoparError:
            return None

    def same_graphs(self) -> Iterator[Suggestion]:
        """What changes no operator, so that live ranks have nothing to capture or to measure."""
        strategy = self.problem.strategy
        if strategy.recompute not in (None, "full"):
            yield self.remedy("activations computed again", {"recompute": None}, states=False)
        if strategy.zero not in (None, 3) and self.problem.dp_size > 1:
            yield self.remedy("ZeRO as far as needed", {"zero": None})
            if strategy.recompute not in (None, "full") and not self.found:
                yield self.remedy("both of these", {"zero": None, "recompute": None})

    def same_batch(self, memory: Mapping[str, int]) -> Iterator[Suggestion]:
        """Other parts of the same batch on the same ranks."""
        strategy = self.problem.strategy
        if self.problem.live:
            return
        open_ = not strategy.search and strategy.pp_size == 1
        now = strategy.micro_batches or 1
        if open_ or now > 1:  # otherwise as many as help were tried
            yield from self.first_of(
                self.remedy(f"{n * now} micro-batches", {"micro_batches": n * now}, states=False)
                for n in self.parts(memory)
                if n * now <= MAX_RANKS
            )
        if not strategy.search and self.problem.batch == "global":
            yield from self.first_of(
                self.remedy(f"the model divided over {ranks} ranks", {axis: ranks})
                for axis in ("tp", "pp")
                for ranks in self.divisors(memory)
                if getattr(strategy, axis) is None
            )

    def other_batch_or_ranks(self, memory: Mapping[str, int]) -> Iterator[Suggestion]:
        """The same strategy for fewer rows, or on more ranks."""
        if self.elsewhere is None:
            return
        rows = ((n, partial(self.elsewhere, 1, n)) for n in self.parts(memory))
        yield from self.first_of(
            Suggestion("fewer rows in a batch", f"1/{n} of them", plan, activations=True)
            for n, plan in rows
        )
        least = _power_of_two(sum(memory.values()) / self.cap)
        ranks = ((n, partial(self.elsewhere, n, 1)) for n in (least, 2 * least))
        yield from self.first_of(
            Suggestion("more ranks", f"world_size={n * self.problem.world_size}", plan, True, True)
            for n, plan in ranks
        )

    def first_of(self, remedies: Iterable[Suggestion]) -> Iterator[Suggestion]:
        """Remedies until one of them has helped."""
        before = len(self.found)
        yield from takewhile(lambda _: len(self.found) == before, remedies)

    def parts(self, memory: Mapping[str, int]) -> tuple[int, int]:
        """Into how many parts rows might have to be cut, so that the rest of the cap suffices."""
        states = sum(memory.get(kind, 0) for kind in STATES)
        least = _power_of_two((sum(memory.values()) - states) / max(1, self.cap - states))
        return least, 2 * least

    def divisors(self, memory: Mapping[str, int]) -> list[int]:
        """Over how many ranks parameters and states might have to be divided."""
        least = sum(memory.get(kind, 0) for kind in STATES) / self.cap
        strategy = self.problem.strategy
        ranks = self.problem.world_size // (strategy.model_parallel_size * strategy.pp_size)
        return [n for n in range(2, ranks + 1) if ranks % n == 0 and n >= least][:1]

    def remedy(self, what: str, changes: Mapping[str, Any], *, states: bool = True) -> Suggestion:
        """Another strategy, which lessens activations too."""
        strategy = replace(self.problem.strategy, **changes)
        asked = replace(self.problem, strategy=strategy)
        fields = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        how = f"Strategy({fields})"
        return Suggestion(what, how, partial(self.answer, asked), states, True)


def _power_of_two(parts: float) -> int:
    """The least power of two above one that is as many."""
    return 2 ** max(1, math.ceil(math.log2(max(1.0, parts))))


def _said(change: Change) -> str:
    return (
        f"{change.what} [{change.how}], a step of {change.step_s * 1e3:.1f} ms in "
        f"{human_bytes(change.needed_bytes)}"
    )
