"""Over which axes ranks lie: every mesh that a strategy leaves open, and the fastest of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from operator import not_

from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    OutOfMemoryError,
    StrategyError,
)
from autopar.formatting import human_bytes
from autopar.plan.prediction import RUNNERS_UP, RunnerUp, slower
from autopar.plan.strategy import Strategy
from autopar.planner.deadline import Deadline
from autopar.planner.search.fixed_mesh import PlanningProblem, cap_of
from autopar.planner.search.mesh_estimate import MeshEstimate
from autopar.planner.search.pipeline_search import step_s
from autopar.report.plan import Plan

log = logging.getLogger(__name__)

EstimateMesh = Callable[[PlanningProblem], MeshEstimate]
"""What can be expected of a strategy that leaves no mesh open."""

PlanMesh = Callable[[PlanningProblem], Plan]
"""The fastest plan of a strategy that leaves no mesh open; captures and measures what it needs."""

SMALL_WORLD = 8
"""Ranks up to which the model is divided over nodes too: more would send activations far."""

MICRO_BATCHES = 8
"""As many are tried at most, for each stage."""

NEGLIGIBLE = 0.02
"""Part of a step below which nothing that another mesh could save is looked for."""

MARGIN = 1.15
"""How much slower than the best plan an outline may be: what it estimates is wrong by some part."""

NAMED = 8
"""Meshes that a note names; of more it says how many."""

OF_A_MESH = 0.2
"""Part of the time in which one mesh of several is improved on, beyond a plan of it that fits."""

PATIENCE = 3
"""Outlines in order that are looked at without finding anything faster."""


def deadline_per_mesh(problem: PlanningProblem, in_time: Deadline) -> Deadline:
    """Until when a mesh is improved on, from now: all of the time, if there is no other."""
    return in_time.part(OF_A_MESH) if problem.strategy.search else in_time


@dataclass(frozen=True)
class SearchProgress:
    """How far a search is.

    Attributes:
        mesh: that is looked at now.
        done: how many were before it.
        total: how many there are.
        best_s: seconds of a step of the fastest plan so far, 0 if there is none.
    """

    mesh: str
    done: int
    total: int
    best_s: float

    def __str__(self) -> str:
        best = f", best {self.best_s * 1e3:.1f} ms" if self.best_s else ""
        return f"planning {self.mesh}{best}"


ReportProgress = Callable[[SearchProgress], None]


def meshes(strategy: Strategy, world_size: int, near: int, blocks: int) -> Iterator[Strategy]:
    """Every way to lay ranks along the axes that a strategy leaves open, the fewest parts first.

    Args:
        strategy: what is fixed; `search` names the open axes.
        world_size: number of ranks.
        near: how many of them are on one node.
        blocks: how many parts with parameters the model has, which is the most stages it can have.
    """
    widest = world_size if world_size <= SMALL_WORLD else near
    most = {"pp": blocks, **dict.fromkeys(("tp", "cp", "ep"), widest)}
    found = [replace(strategy, search=())]
    for axis in (a for a in strategy.search if a in most and getattr(strategy, a) is None):
        sizes = [n for n in range(1, most[axis] + 1) if world_size % n == 0]
        found = [replace(one, **{axis: n}) for one in found for n in sizes]  # type: ignore[arg-type]
    fitting = [one for one in found if world_size % _parts(one) == 0]
    for one in sorted(fitting, key=lambda one: (_parts(one), one.pp_size)):
        yield one
        neighbours, ranks = near // one.model_parallel_size, world_size // _parts(one)
        shards = "dp_shard" in strategy.search and one.dp_shard is None and one.zero != 0
        if shards and 1 < neighbours < ranks and ranks % neighbours == 0:
            yield replace(one, dp_shard=neighbours)


def _parts(strategy: Strategy) -> int:
    return strategy.model_parallel_size * strategy.pp_size


def counted(strategy: Strategy) -> Iterator[Strategy]:
    """The numbers of micro-batches that a mesh leaves open, the fewest first."""
    if strategy.micro_batches is not None:
        yield strategy
        return
    count, most = 1, MICRO_BATCHES * max(1, strategy.pp_size)
    while count <= most:
        yield replace(strategy, micro_batches=count)
        count *= 2


def fastest_mesh(
    problem: PlanningProblem,
    look: PlanMesh,
    outline: EstimateMesh,
    near: int,
    go_on: Callable[[], bool] = lambda: True,
    progress: ReportProgress = lambda looked: None,
) -> Plan:
    """The fastest plan that fits, of all meshes that a strategy leaves open.

    Of few ranks data parallelism is looked at first. The search ends there where the plan computes
    all but a negligible part of its step: every mesh divides the same work. Otherwise all are
    looked at in the order of their outlines. A mesh is left out where its states alone exceed the
    cap, where it can be no faster than the best so far, or is not expected to be by a margin.
    Live ranks call this at once; they all see the same plans, outlines and errors.

    Args:
        problem: what is asked.
        look: answers a question without an open mesh.
        outline: what can be expected of such a question; None where it is not possible.
        near: ranks of a node.
        go_on: asked before every further mesh, and before improving on a plan that fits.
        progress: told of every mesh before it is looked at.

    Raises:
        OutOfMemoryError: nothing fits; that of the mesh that lacks least.
    """
    if not problem.strategy.search:
        return look(problem)
    search = _Search(problem, look, progress)
    first, *others = meshes(problem.strategy, problem.world_size, near, len(problem.blocks))
    small = problem.world_size <= SMALL_WORLD
    if small:
        search.try_mesh(first, 0, len(others) + 1)
        if search.best is not None and search.is_bound_by_computing():
            return search.end(f"not looked at: {_few(map(_name, others))}; {search.gain()}")
    found = search.in_order((first, *others), outline, again=small)
    for done, each in enumerate(found, 1):
        if search.best is not None and (not search.hopes_for(each) or not go_on()):
            search.left_out.append(each)
        else:
            search.try_mesh(each.strategy, done, len(found) + 1)
    return search.end(*search.unseen())


class _Search:
    def __init__(self, problem: PlanningProblem, look: PlanMesh, progress: ReportProgress) -> None:
        self.problem, self.plan_mesh, self.progress = problem, look, progress
        self.cap = cap_of(problem, problem.cluster)
        self.plans: list[Plan] = []
        self.failures: list[OutOfMemoryError] = []
        self.refusals: dict[str, AutoparError] = {}
        self.left_out: list[MeshEstimate] = []
        self.in_vain = Counter[str]()
        self.near = (
            1.0 if problem.autotune_candidates is None else NEAR
        )  # what may be tried is looked at

    @property
    def best(self) -> Plan | None:
        return min(self.plans, key=step_s) if self.plans else None

    def is_bound_by_computing(self) -> bool:
        """Whether no mesh can be much faster than the best so far."""
        assert self.best is not None
        whole = all(level == "none" for _, level in self.best.recompute)
        return whole and _to_gain(self.best) <= NEGLIGIBLE

    def try_mesh(self, strategy: Strategy, done: int, total: int) -> None:
        """Looks at a mesh, and with how many micro-batches; without stages one is as it is."""
        best_s = step_s(self.best) if self.best is not None else 0.0
        looked = SearchProgress(_name(strategy), done, total, best_s)
        log.info("%s, %d of %d", looked, done + 1, total)
        self.progress(looked)
        if not self.holds_states(strategy):
            return
        if strategy.pp_size == 1 and strategy.micro_batches == 1:
            strategy = replace(strategy, micro_batches=self.problem.strategy.micro_batches)
        problem, before = replace(self.problem, strategy=strategy), self.best
        if before is not None:
            problem = replace(problem, incumbent_s=self.near * step_s(before))
        try:
            self.plans.append(self.plan_mesh(problem))
        except OutOfMemoryError as failure:
            self.failures.append(failure)
        except (StrategyError, BatchError, CaptureError) as refusal:
            if isinstance(refusal, CaptureError) and _parts(strategy) == 1:
                raise  # torch's own data parallelism may serve
            self.refusals[_name(strategy)] = refusal
        kind = self.kind(strategy)
        self.in_vain[kind] = 0 if self.best is not before else self.in_vain[kind] + 1

    def in_order(
        self, strategies: Sequence[Strategy], outline: EstimateMesh, again: bool
    ) -> list[MeshEstimate]:
        """Outlines of what else there is to look at, the most promising first.

        Where the best of several are tried, the best of every mesh that was not looked at comes
        before any others: outlines of one mesh err alike.

        Args:
            strategies: of all meshes, the first of which may have been looked at.
            outline: what can be expected of one.
            again: whether it has.
        """
        found = []
        roomy = filter(self.holds_states, strategies)
        for strategy in (each for mesh in roomy for each in counted(mesh)):
            if again and _parts(strategy) == strategy.micro_batches == 1:
                continue
            waits = strategy.pp_size == 1 and (strategy.micro_batches or 1) > 1
            if again and waits and not self.presses():
                continue
            try:
                found.append(outline(replace(self.problem, strategy=strategy)))
            except (StrategyError, BatchError, CaptureError) as refusal:
                self.refusals.setdefault(_name(strategy), refusal)
        found.sort(key=lambda each: (each.step_s, each.least_bytes))
        if self.problem.autotune_candidates is None:
            return found
        kinds = [self.kind(each.strategy) for each in found]
        looked = {self.kind(strategies[0])} if again else set()
        first = [kind not in {*looked, *kinds[:place]} for place, kind in enumerate(kinds)]
        return [*compress(found, first), *compress(found, map(not_, first))]

    def presses(self) -> bool:
        """Whether less in memory at once could do better: rows that wait compute no faster."""
        if self.best is None:
            return bool(self.failures)
        recomputes = any(level != "none" for _, level in self.best.recompute)
        return self.best.memory_cap is not None and recomputes

    def kind(self, strategy: Strategy) -> str:
        """What patience is with: each mesh, where the best of several are tried, or all of them."""
        own = self.problem.autotune_candidates is not None
        return _name(replace(strategy, micro_batches=None)) if own else ""

    def hopes_for(self, outline: MeshEstimate) -> bool:
        """Whether a mesh could be faster than the best so far, and is likely to."""
        assert self.best is not None
        limit = step_s(self.best)
        patient = self.in_vain[self.kind(outline.strategy)] < PATIENCE
        likely = outline.step_s < self.near * MARGIN * limit and patient
        return likely and outline.least_s < limit

    def holds_states(self, strategy: Strategy) -> bool:
        """Whether a rank's part of parameters, gradients and states is under the cap."""
        if self.cap is None:
            return True
        base = self.problem.base()
        total = sum(size for _, size in base.parameter_bytes)
        ranks = strategy.dp_shard or self.problem.world_size // _parts(strategy)
        parts = _parts(strategy) * (ranks if strategy.zero in (None, 3) else 1)
        short = int(total * (2.0 + base.optimizer_state_ratio) / parts) - self.cap
        if short > 0:
            text = f"parameters, gradients and states alone need {human_bytes(short)} more"
            self.failures.append(OutOfMemoryError(f"{_name(strategy)}: {text}", short))
        return short <= 0

    def gain(self) -> str:
        """What no other mesh could do better than."""
        assert self.best is not None
        again = any(level != "none" for _, level in self.best.recompute)
        part = f"{_to_gain(self.best):.0%} of the step{' and what it computes again' * again}"
        return f"{part} is all that they could save"

    def unseen(self) -> Iterator[str]:
        """What was left out, and how fast it could be."""
        if self.left_out:
            likely = min(each.step_s for each in self.left_out)
            least = min(each.least_s for each in self.left_out)
            names = _few(_name(each.strategy) for each in self.left_out)
            yield (
                f"not looked at: {names}; expected to take {likely * 1e3:.4g} ms or more, and "
                f"certainly {least * 1e3:.4g}"
            )

    def end(self, *left: str) -> Plan:
        """The best plan, with the others; or why there is none."""
        if self.best is None:
            if self.failures:
                raise min(self.failures, key=lambda failure: failure.shortfall)
            raise next(iter(self.refusals.values()))
        best = self.best
        notes = (*best.notes, *self.refused(), *left)
        return replace(best, runners_up=self.runners_up(best), notes=notes)

    def refused(self) -> Iterator[str]:
        """What is not possible, and why; where it is the rows, once for all."""
        rows = [mesh for mesh, why in self.refusals.items() if isinstance(why, BatchError)]
        for mesh, why in self.refusals.items():
            if len(rows) == 1 or mesh not in rows:
                yield f"{mesh} is not possible: {why}"
        if len(rows) > 1:
            yield f"not possible with so many rows: {_few(rows)}"

    def runners_up(self, best: Plan) -> tuple[RunnerUp, ...]:
        """The fastest of every other mesh, and what lost under the same one."""
        assert best.prediction is not None
        found = {}
        for plan in self.plans:
            if plan is not best and plan.prediction is not None:
                why = slower(plan.prediction, best.prediction)
                found[plan.name] = RunnerUp.of(plan.name, plan.prediction, why)
        for other in best.runners_up:
            found.setdefault(other.name, other)
        return tuple(sorted(found.values(), key=lambda other: other.step_s)[:RUNNERS_UP])


def _to_gain(plan: Plan) -> float:
    """The part of a step that a plan waits for other ranks: no mesh computes less."""
    cost = plan.prediction
    assert cost is not None
    return cost.exposed_s / cost.step_s + cost.bubble if cost.step_s else 0.0


def _few(names: Iterable[str]) -> str:
    """Some names, and how many there are."""
    first, rest = list(islice(names := iter(names), NAMED)), len(list(names))
    return ", ".join(first) + (f" and {rest} more" if rest else "")


def _name(strategy: Strategy) -> str:
    axes = {"pp": strategy.pp_size, **strategy.axes, "dp_shard": strategy.dp_shard or 1}
    mesh = " x ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1) or "data parallel"
    count = strategy.micro_batches or 1
    return f"{mesh}, {count} micro-batches" if count > 1 else mesh


NEAR = 1.3
"""Times as slow as the best a plan may be predicted to be, and still be looked for."""
