"""`fastest_mesh`: the fastest plan over all meshes that a strategy leaves open."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from autopar.common.deadline import TimeIsOver
from autopar.cost_model.cost import ClusterError
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    OutOfMemoryError,
    StrategyError,
)
from autopar.formatting import human_bytes
from autopar.plan.prediction import RUNNERS_UP, RunnerUp, slower
from autopar.plan.search_outcome import SearchOutcome
from autopar.plan.strategy import Strategy
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.search.mesh_estimate import MeshEstimate
from autopar.planner.search.pipeline_search import step_s
from autopar.report.plan import Plan

log = logging.getLogger(__name__)

EstimateMesh = Callable[[PlanningProblem], MeshEstimate]
"""Estimates a problem without an open mesh."""

PlanMesh = Callable[[PlanningProblem, SearchContext], Plan]
"""Captures, measures and plans a problem without an open mesh."""

NEGLIGIBLE = 0.02
"""Fraction of a step: other meshes are not tried if they could save at most this."""

MARGIN = 1.15
"""Ratio of an estimate to the best step time above which a mesh is skipped: estimates err."""

AUTOTUNE_MARGIN = 1.3
"""Ratio to the best predicted step time up to which a plan is worth benchmarking."""

PATIENCE = 3
"""Stop after this many meshes without improvement."""

SMALL_WORLD = 8
"""Largest world in which model-parallel axes may cross nodes, where links are slow."""

MICRO_BATCHES_PER_STAGE = 8
"""Most micro-batches tried, for each stage."""

NAMED_MESHES = 8
"""Meshes that a note names; it counts the rest."""


@dataclass(frozen=True)
class SearchProgress:
    """Progress of a search.

    Attributes:
        done: number of meshes before it.
        best_s: predicted step time of the best plan so far in seconds, 0 if there is none.
    """

    mesh: str
    done: int
    total: int
    best_s: float

    def __str__(self) -> str:
        best = f", best {self.best_s * 1e3:.1f} ms" if self.best_s else ""
        return f"planning {self.mesh}{best}"


ReportProgress = Callable[[SearchProgress], None]


def fastest_mesh(
    problem: PlanningProblem,
    plan_mesh: PlanMesh,
    estimate: EstimateMesh,
    ranks_per_node: int,
    context: SearchContext | None = None,
    progress: ReportProgress = lambda progress: None,
) -> Plan:
    """The fastest plan that fits, over all meshes that a strategy leaves open.

    In small worlds the search tries data parallelism first. It ends there if nearly all of the step
    is compute, since every mesh divides the same work. Otherwise it tries meshes in order of their
    estimates. It skips a mesh if its states alone exceed the cap, or its lower bound exceeds the
    best step time. It also skips a mesh with an estimate slower by a margin. All live ranks
    call this at once and see the same plans, estimates and errors.

    Raises:
        OutOfMemoryError: nothing fits; raises the least shortfall.
    """
    context = context or SearchContext()
    if not problem.strategy.search:
        return plan_mesh(problem, context)
    search = _MeshSearch(problem, plan_mesh, context, progress)
    first, *others = meshes(
        problem.strategy, problem.world_size, ranks_per_node, len(problem.blocks)
    )
    small = problem.world_size <= SMALL_WORLD
    if small:
        search.try_mesh(first, 0, len(others) + 1)
        best = search.best
        if best and not _recomputes(best) and (saveable := _saveable(best)) <= NEGLIGIBLE:
            names = abbreviated(map(mesh_name, others))
            savings = f"{saveable:.0%} of the step is all that they could save"
            least_s = (1.0 - saveable) * step_s(best)
            return search.finish(f"not looked at: {names}; {savings}", bound_s=least_s)
    ordered = search.estimated((first, *others), estimate, tried_first=small)
    for done, each in enumerate(ordered, 1):
        tries = search.best is None or (search.may_improve(each) and context.deadline())
        if search.over or not tries:
            search.skipped.append(each)
        else:
            search.try_mesh(each.strategy, done, len(ordered) + 1)
    return search.finish(*search.skipped_note())


@dataclass
class _MeshSearch:
    """Plans and refusals of the meshes tried so far.

    Attributes:
        refusals: errors of meshes that are not possible, by name.
        skipped: estimates of meshes that were not tried.
        bounds_s: lower bound of the step of each estimated mesh, in seconds.
        unknown: meshes that were not estimated, because time was over.
        over: whether time ended within a mesh.
        looked: number of meshes that were planned.
        without_gain: number of meshes in a row that improved nothing, by group.
    """

    problem: PlanningProblem
    plan_mesh: PlanMesh
    context: SearchContext
    progress: ReportProgress
    plans: list[Plan] = field(default_factory=list)
    failures: list[OutOfMemoryError] = field(default_factory=list)
    refusals: dict[str, AutoparError] = field(default_factory=dict)
    skipped: list[MeshEstimate] = field(default_factory=list)
    bounds_s: list[float] = field(default_factory=list)
    unknown: list[Strategy] = field(default_factory=list)
    over: bool = False
    looked: int = 0
    without_gain: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.cap = self.problem.cap_on(self.problem.cluster)
        self.autotunes = self.context.on_candidate is not None
        self.margin = AUTOTUNE_MARGIN if self.autotunes else 1.0

    @property
    def best(self) -> Plan | None:
        return min(self.plans, key=step_s) if self.plans else None

    def try_mesh(self, strategy: Strategy, done: int, total: int) -> None:
        """Plans a mesh; the planner chooses the number of micro-batches if the mesh has one."""
        best_s = step_s(self.best) if self.best is not None else 0.0
        progress = SearchProgress(mesh_name(strategy), done, total, best_s)
        log.info("%s, %d of %d", progress, done + 1, total)
        self.progress(progress)
        if not self.states_fit(strategy):
            return
        if strategy.pp_size == 1 and strategy.micro_batches == 1:
            strategy = replace(strategy, micro_batches=self.problem.strategy.micro_batches)
        problem, context, before = replace(self.problem, strategy=strategy), self.context, self.best
        if before is not None:
            context = replace(context, incumbent_s=self.margin * step_s(before))
        self.looked += 1
        try:
            self.plans.append(self.plan_mesh(problem, context))
        except OutOfMemoryError as failure:
            self.failures.append(failure)
        except (StrategyError, BatchError, CaptureError, ClusterError) as refusal:
            if isinstance(refusal, CaptureError) and model_ranks(strategy) == 1:
                raise  # the caller may fall back to torch's data parallelism
            self.refusals[mesh_name(strategy)] = refusal
        except TimeIsOver:
            if not (self.plans or self.failures):
                raise
            self.over = True
        group = self.group(strategy)
        self.without_gain[group] = 0 if self.best is not before else self.without_gain[group] + 1

    def estimated(
        self, strategies: Sequence[Strategy], estimate: EstimateMesh, *, tried_first: bool
    ) -> list[MeshEstimate]:
        """Estimates of the meshes left to try, the most promising first.

        For autotuning, the best estimate of each untried mesh comes first, since errors of
        estimates correlate within a mesh.
        """
        found = []
        fitting = filter(self.states_fit, strategies)
        for strategy in (each for mesh in fitting for each in with_micro_batches(mesh)):
            if tried_first and model_ranks(strategy) == strategy.micro_batches == 1:
                continue
            accumulates = strategy.pp_size == 1 and (strategy.micro_batches or 1) > 1
            if tried_first and accumulates and not self.is_memory_bound():
                continue
            if self.best is not None and not self.context.deadline():
                self.unknown.append(strategy)
                continue
            try:
                found.append(estimate(replace(self.problem, strategy=strategy)))
                self.bounds_s.append(found[-1].least_s)
            except TimeIsOver:
                self.unknown.append(strategy)
            except (StrategyError, BatchError, CaptureError, ClusterError) as refusal:
                self.refusals.setdefault(mesh_name(strategy), refusal)
        found.sort(key=lambda each: (each.step_s, each.least_bytes))
        if not self.autotunes:
            return found
        seen = {self.group(strategies[0])} if tried_first else set()
        first: list[MeshEstimate] = []
        rest: list[MeshEstimate] = []
        for each in found:
            (rest if self.group(each.strategy) in seen else first).append(each)
            seen.add(self.group(each.strategy))
        return first + rest

    def is_memory_bound(self) -> bool:
        """Whether smaller micro-batches could help; they only save memory."""
        if self.best is None:
            return bool(self.failures)
        return self.best.memory_cap is not None and _recomputes(self.best)

    def group(self, strategy: Strategy) -> str:
        """Group of a mesh in `without_gain`: its own when autotuning, else one for all."""
        return mesh_name(replace(strategy, micro_batches=None)) if self.autotunes else ""

    def may_improve(self, estimate: MeshEstimate) -> bool:
        assert self.best is not None
        best_s = step_s(self.best)
        patient = self.without_gain[self.group(estimate.strategy)] < PATIENCE
        likely = estimate.step_s < self.margin * MARGIN * best_s and patient
        return likely and estimate.least_s < best_s

    def states_fit(self, strategy: Strategy) -> bool:
        """Whether parameters, gradients and states fit if all axes divide them evenly."""
        if self.cap is None:
            return True
        base = self.problem.base()
        total = sum(size for _, size in base.parameter_bytes)
        ranks = strategy.dp_shard or self.problem.world_size // model_ranks(strategy)
        parts = model_ranks(strategy) * (ranks if strategy.zero in (None, 3) else 1)
        short = int(total * (2.0 + base.optimizer_state_ratio) / parts) - self.cap
        if short > 0:
            text = f"parameters, gradients and states alone need {human_bytes(short)} more"
            self.failures.append(OutOfMemoryError(f"{mesh_name(strategy)}: {text}", short))
        return short <= 0

    def skipped_note(self) -> Iterator[str]:
        if self.skipped:
            expected_s = min(each.step_s for each in self.skipped)
            bound_s = min(each.least_s for each in self.skipped)
            names = abbreviated(mesh_name(each.strategy) for each in self.skipped)
            yield (
                f"not looked at: {names}; expected to take {expected_s * 1e3:.4g} ms or more, and "
                f"certainly {bound_s * 1e3:.4g}"
            )
        if self.unknown:
            names = abbreviated(map(mesh_name, self.unknown))
            yield f"not looked at: {names}; time was over"

    def outcome(self, bound_s: float | None) -> SearchOutcome:
        """Extent of the search; the bound is that of all estimated meshes unless given."""
        assert self.best is not None
        left_out = len(self.skipped) + len(self.unknown)
        if bound_s is None:
            known = min([*self.bounds_s, step_s(self.best)])
            bound_s = 0.0 if self.unknown else known
        return SearchOutcome(
            looked=self.looked,
            left_out=left_out,
            bound_s=bound_s,
            complete=not self.unknown and not self.over,
        )

    def finish(self, *notes: str, bound_s: float | None = None) -> Plan:
        """The best plan with runners-up and notes; raises the least shortfall, else a refusal."""
        if self.best is None:
            if self.failures:
                raise min(self.failures, key=lambda failure: failure.shortfall)
            if self.refusals:
                raise next(iter(self.refusals.values()))
            raise TimeIsOver
        best = self.best
        notes = (*best.notes, *self.refusal_notes(), *notes)
        found = self.outcome(bound_s)
        return replace(best, runners_up=self.runners_up(best), notes=notes, search=found)

    def refusal_notes(self) -> Iterator[str]:
        """Notes on meshes that are not possible; several that lack rows share one note."""
        rows = [mesh for mesh, why in self.refusals.items() if isinstance(why, BatchError)]
        for mesh, why in self.refusals.items():
            if len(rows) == 1 or mesh not in rows:
                yield f"{mesh} is not possible: {why}"
        if len(rows) > 1:
            yield f"not possible with so many rows: {abbreviated(rows)}"

    def runners_up(self, best: Plan) -> tuple[RunnerUp, ...]:
        """The best plans of the other meshes, and the runners-up on the best mesh."""
        assert best.prediction is not None
        found = {}
        for plan in self.plans:
            if plan is not best and plan.prediction is not None:
                why = slower(plan.prediction, best.prediction)
                found[plan.name] = RunnerUp.of(plan.name, plan.prediction, why)
        for other in best.runners_up:
            found.setdefault(other.name, other)
        return tuple(sorted(found.values(), key=lambda other: other.step_s)[:RUNNERS_UP])


def _recomputes(plan: Plan) -> bool:
    return any(level != "none" for _, level in plan.recompute)


def _saveable(plan: Plan) -> float:
    """Fraction of a step that a rank stalls, the most that another mesh can save."""
    cost = plan.prediction
    assert cost is not None
    return cost.exposed_s / cost.step_s + cost.bubble if cost.step_s else 0.0


def meshes(
    strategy: Strategy, world_size: int, ranks_per_node: int, blocks: int
) -> Iterator[Strategy]:
    """Every mesh that `strategy.search` leaves open, the fewest model-parallel ranks first."""
    widest = world_size if world_size <= SMALL_WORLD else ranks_per_node
    most = {"pp": blocks, **dict.fromkeys(("tp", "cp", "ep"), widest)}
    found = [replace(strategy, search=())]
    for axis in (a for a in strategy.search if a in most and getattr(strategy, a) is None):
        sizes = [n for n in range(1, most[axis] + 1) if world_size % n == 0]
        found = [replace(one, **{axis: n}) for one in found for n in sizes]  # type: ignore[arg-type]
    fitting = [one for one in found if world_size % model_ranks(one) == 0]
    for one in sorted(fitting, key=lambda one: (model_ranks(one), one.pp_size)):
        yield one
        neighbours = ranks_per_node // one.model_parallel_size
        ranks = world_size // model_ranks(one)
        shards = "dp_shard" in strategy.search and one.dp_shard is None and one.zero != 0
        if shards and 1 < neighbours < ranks and ranks % neighbours == 0:
            yield replace(one, dp_shard=neighbours)


def with_micro_batches(strategy: Strategy) -> Iterator[Strategy]:
    """The strategy with each number of micro-batches that it leaves open, the fewest first."""
    if strategy.micro_batches is not None:
        yield strategy
        return
    count, most = 1, MICRO_BATCHES_PER_STAGE * max(1, strategy.pp_size)
    while count <= most:
        yield replace(strategy, micro_batches=count)
        count *= 2


def model_ranks(strategy: Strategy) -> int:
    """Number of ranks that share one copy of the model."""
    return strategy.model_parallel_size * strategy.pp_size


def mesh_name(strategy: Strategy) -> str:
    """The mesh and number of micro-batches as text."""
    axes = {"pp": strategy.pp_size, **strategy.axes, "dp_shard": strategy.dp_shard or 1}
    mesh = " x ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1) or "data parallel"
    count = strategy.micro_batches or 1
    return f"{mesh}, {count} micro-batches" if count > 1 else mesh


def abbreviated(names: Iterable[str]) -> str:
    """The first names, and the number of further names."""
    names = iter(names)
    first, rest = list(islice(names, NAMED_MESHES)), len(list(names))
    return ", ".join(first) + (f" and {rest} more" if rest else "")
