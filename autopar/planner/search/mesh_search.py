"""`fastest_mesh`: the fastest plan over all meshes that a strategy leaves open."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from autopar.core.common.deadline import TimeIsOver, arm
from autopar.core.plan.plan import Plan
from autopar.core.plan.search_outcome import PracticePlan
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cost import ClusterError
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    OutOfMemoryError,
    StrategyError,
)
from autopar.formatting import human_bytes
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.search.mesh_estimate import MeshEstimate
from autopar.planner.search.meshes import (
    MOST_MICRO_BATCHES,
    SMALL_WORLD,
    likely_to_fit,
    mesh_name,
    micro_batched,
    model_ranks,
    open_meshes,
    unusual_axes,
)
from autopar.planner.search.pipeline_search import step_s
from autopar.planner.search.practice import NO_TIME, PracticeLayout, priced, why_not
from autopar.planner.search.search_progress import (
    ReportProgress,
    SearchProgress,
    TooCostlyError,
)
from autopar.planner.search.search_record import NEGLIGIBLE, SearchRecord
from autopar.planner.search.state_bytes import least_divided_bytes

log = logging.getLogger(__name__)

EstimateMesh = Callable[[PlanningProblem], MeshEstimate]
"""Estimates a problem without an open mesh."""

RefinePlan = Callable[[Plan], Plan | None]
"""A plan that was predicted by arithmetic, lowered whole; None if it is, or if time lacks."""

PlanMesh = Callable[[PlanningProblem, SearchContext], Plan]
"""Captures, measures and plans a problem without an open mesh."""

MARGIN = 1.15
"""Ratio of an estimate to the best step time above which a mesh is skipped: estimates err."""

AUTOTUNE_MARGIN = 1.3
"""Ratio to the best predicted step time up to which a plan is worth benchmarking."""

PATIENCE = 3
"""Stop after this many meshes without improvement."""

DATA_PARALLEL_TRIES = 4
"""Number of micro-batch sizes of data parallelism that are planned before other meshes."""

UNDIVIDED = "tp divides rows alone, so it is data parallelism by another name"


def fastest_mesh(
    problem: PlanningProblem,
    plan_mesh: PlanMesh,
    estimate: EstimateMesh,
    ranks_per_node: int,
    context: SearchContext | None = None,
    progress: ReportProgress = lambda progress: None,
    refine: RefinePlan = lambda plan: None,
    layouts: Sequence[PracticeLayout] = (),
) -> Plan:
    """The fastest plan that fits, over all meshes that a strategy leaves open.

    Data parallelism and usual `layouts` come first. The search ends there if nearly all of the step
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
    search = _MeshSearch(problem=problem, plan_mesh=plan_mesh, context=context, progress=progress)
    first, *others = open_meshes(problem, ranks_per_node)
    small = problem.world_size <= SMALL_WORLD
    if context.timed:
        return search.timed((first, *others), layouts, estimate, refine)
    if small:
        search.try_mesh(first, 0, len(others) + 1)
    search.try_practice(layouts)
    if small and search.computes_only():
        return search.finish_computing(others)
    search.try_all(search.estimated((first, *others), estimate, tried_first=small))
    search.refine_best(refine)
    return search.finish(*search.skipped_note())


@dataclass(kw_only=True)
class _MeshSearch(SearchRecord):
    """A search under way.

    Attributes:
        over: whether time ended within a mesh.
        without_gain: number of meshes in a row that improved nothing, by group.
        reported: names of meshes of which a candidate was reported.
        pinned: plans of usual layouts, or the reasons why there are none, by strategy.
    """

    plan_mesh: PlanMesh
    context: SearchContext
    progress: ReportProgress
    over: bool = False
    without_gain: Counter[str] = field(default_factory=Counter)
    reported: set[str] = field(default_factory=set)
    pinned: dict[str, Plan | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cap = self.problem.cap_on(self.problem.cluster)
        self.least_bytes = cache(partial(least_divided_bytes, self.problem))
        self.autotunes = self.context.on_candidate is not None
        self.margin = AUTOTUNE_MARGIN if self.autotunes else 1.0

    def try_mesh(self, strategy: Strategy, done: int, total: int, *, pinned: bool = False) -> str:
        """Plans a mesh; the reason why there is no plan, "" if there is one.

        The planner chooses the number of micro-batches if the mesh has one. A `pinned` strategy
        fixes more than the mesh, so it tells nothing of the mesh's other plans.
        """
        best_s = step_s(self.best) if self.best is not None else 0.0
        progress = SearchProgress(mesh_name(strategy), done, total, best_s)
        log.info("%s, %d of %d", progress, done + 1, total)
        self.progress(progress)
        if not self.states_fit(strategy):
            return why_not(self.failures[-1])
        if strategy.pp_size == 1 and strategy.micro_batches == 1:
            strategy = replace(strategy, micro_batches=self.problem.strategy.micro_batches)
        problem, context, before = replace(self.problem, strategy=strategy), self.context, self.best
        if before is not None:
            context = replace(context, incumbent_s=self.margin * step_s(before))
        elif context.timed:
            context = replace(context, on_candidate=partial(self.report_first, progress))
        self.looked += 1
        if not pinned:
            self.tried.add(mesh_name(strategy))
        why = ""
        try:
            self.plans.append(plan := self.plan_mesh(problem, context))
            if not pinned and plan.search is not None:
                self.raise_bound(strategy, plan.search.bound_s)
        except OutOfMemoryError as failure:
            self.failures.append(failure)
            if not pinned:
                self.raise_bound(strategy, math.inf)
            arm()
            why = why_not(failure)
        except (StrategyError, BatchError, CaptureError, ClusterError) as refusal:
            if isinstance(refusal, CaptureError) and model_ranks(strategy) == 1:
                raise  # the caller may fall back to torch's data parallelism
            if not pinned:
                self.refusals[mesh_name(strategy)] = refusal
            why = why_not(refusal)
        except TooCostlyError as costs:
            self.costly.append(strategy)
            why = why_not(costs)
        except TimeIsOver as end:
            if not (self.plans or self.failures):
                raise
            self.over, why = True, why_not(end)
        if pinned:
            return why
        group = self.group(strategy)
        self.without_gain[group] = 0 if self.best is not before else self.without_gain[group] + 1
        return why

    def report_first(self, progress: SearchProgress, plan: Plan) -> None:
        """Reports the first candidate of a mesh that fits, before the mesh is done."""
        cost = plan.prediction
        if cost is None or progress.mesh in self.reported:
            return
        if self.fits(plan):
            self.reported.add(progress.mesh)
            self.progress(replace(progress, best_s=cost.step_s))

    def timed(
        self,
        strategies: Sequence[Strategy],
        layouts: Sequence[PracticeLayout],
        estimate: EstimateMesh,
        refine: RefinePlan,
    ) -> Plan:
        """The search under a time limit: data parallelism first, so that there is an answer.

        Beyond small worlds, usual layouts follow before anything is estimated.
        """
        plain, *others = strategies
        self.try_data_parallel(plain)
        if self.problem.world_size > SMALL_WORLD:
            self.try_practice(layouts)
        for strategy in sorted(others, key=likely_to_fit):
            before = self.best
            divided = before is None or before.model_parallel_size > 1
            practised = before is not None and bool(self.practice)
            if self.over or practised or not divided or not self.context.estimating():
                break
            if strategy.pp_size == 1 and self.states_fit(strategy):
                self.try_data_parallel(strategy)
                if before is not None and self.best is before:
                    break  # narrower models do not help
        if self.problem.world_size <= SMALL_WORLD:
            self.try_practice(layouts)
        if self.computes_only():
            self.refine_best(refine)
            return self.finish_computing(others)
        others.sort(key=unusual_axes)
        self.floor_s = self.floor_s or self.floor()
        small = self.problem.world_size <= SMALL_WORLD
        found = self.estimated([plain, *others], estimate, tried_first=small)
        self.try_all([each for each in found if mesh_name(each.strategy) not in self.tried])
        self.try_unknown()
        self.close_gap()
        self.refine_best(refine)
        return self.finish(*self.skipped_note())

    def try_practice(self, layouts: Sequence[PracticeLayout]) -> None:
        """Plans each usual layout, and again with smaller micro-batches if it does not fit."""
        for layout in layouts:
            usual = self.practice.get(layout.name)
            if usual is None or not usual.plan:
                self.practice[layout.name] = self.practised(layout)

    def practised(self, layout: PracticeLayout) -> PracticePlan:
        """The plan of a usual layout, or the reason why there is none."""
        if (key := str(layout.strategy)) not in self.pinned:
            if self.over or not self.context.deadline():
                return PracticePlan(layout.name, why=NO_TIME)
            why = self.try_mesh(layout.strategy, self.looked, self.looked + 1, pinned=True)
            self.pinned[key] = why or self.plans[-1]
        plan = self.pinned[key]
        return (
            PracticePlan(layout.name, why=plan) if isinstance(plan, str) else priced(layout, plan)
        )

    def close_gap(self) -> None:
        """Plans the meshes of the least bounds, while that may raise the bound of all."""
        while self.best is not None and self.context.proving() and not self.over:
            left = [each for each in self.skipped if each.strategy.pp_size == 1]
            mesh = min(left, key=lambda each: each.least_s, default=None)
            saving_s = NEGLIGIBLE * step_s(self.best)
            if mesh is None or mesh.least_s > min(self.least_s(), step_s(self.best) - saving_s):
                return
            self.skipped.remove(mesh)
            self.try_mesh(mesh.strategy, self.looked, self.looked + len(left))

    def floor(self) -> float:
        """A lower bound of the step of every mesh in seconds; 0 if time is over."""
        try:
            return self.context.floor_s() if self.best is None or self.context.deadline() else 0.0
        except (TimeIsOver, AutoparError):
            return 0.0

    def try_data_parallel(self, plain: Strategy) -> None:
        """Plans data parallelism with whole batches and with parts of them.

        In small worlds whole batches come first, and parts of them if memory demands it, unless
        another mesh did not fit. Else the fewest rows come first, which are the likeliest to fit.
        Whole batches follow, then the parts next to the faster of the two, while that helps.
        """
        whole, *parts = micro_batched(self.problem, plain, MOST_MICRO_BATCHES)
        small = self.problem.world_size <= SMALL_WORLD and not self.failures
        most = self.looked + DATA_PARALLEL_TRIES
        if small or not parts:
            self._try_in_turn([whole, *parts], most, small=True)
            return
        possible = self._try_in_turn(parts[::-1], self.looked + 1)
        before = self.best
        if possible is None or self.over:
            return
        self.try_part(whole, most)
        left = parts[: parts.index(possible)]
        self._try_in_turn(left if self.best is not before else left[::-1], most)

    def _try_in_turn(
        self, strategies: Sequence[Strategy], most: int, *, small: bool = False
    ) -> Strategy | None:
        """Plans strategies until one does not help, or `most` were planned; the last possible."""
        possible = None
        for strategy in strategies:
            if self.over or self.looked >= most:
                break
            before, looked = self.best, self.looked
            self.try_part(strategy, most)
            if self.looked == looked:
                continue  # so many rows there are not
            possible = strategy
            useless = not self.is_memory_bound() if small else self.best is before
            if useless:  # more rows need more memory
                break
        return possible

    def try_part(self, strategy: Strategy, most: int) -> None:
        """Plans data parallelism with a number of micro-batches, which counts if it is possible."""
        self.try_mesh(strategy, self.looked, most)
        if self.best is not None and not self.floor_s:
            self.floor_s = self.floor()  # while there is time for it
        self.looked -= self.refusals.pop(mesh_name(strategy), None) is not None

    def try_unknown(self) -> None:
        """Plans meshes without pipeline stages that have no estimate, while time is left."""
        for strategy in [each for each in self.unknown if each.pp_size == 1]:
            if self.over or not self.context.deadline():
                return
            self.unknown.remove(strategy)
            self.try_mesh(strategy, self.looked, self.looked + len(self.unknown) + 1)

    def try_all(self, ordered: Sequence[MeshEstimate]) -> None:
        """Plans estimated meshes in order, as far as they may improve on the best."""
        for done, each in enumerate(ordered, 1):
            tries = self.best is None or (self.may_improve(each) and self.context.deadline())
            if self.over or not tries:
                self.skipped.append(each)
            else:
                self.try_mesh(each.strategy, done, len(ordered) + 1)

    def refine_best(self, refine: RefinePlan) -> None:
        """Lowers the best plan whole, and the next one if that is slower then or does not fit.

        The only plan stays although it does not fit: it says so.
        """
        while (best := self.best) is not None:
            self.progress(SearchProgress(f"{best.name} whole", 0, 0, step_s(best)))
            try:
                whole = refine(best)
            except OutOfMemoryError as failure:
                self.plans.remove(best)
                self.failures.append(failure)
                continue
            if whole is None:
                return
            if len(self.plans) > 1 and not self.fits(whole):
                self.plans.remove(best)
            else:
                self.plans[self.plans.index(best)] = whole

    def fits(self, plan: Plan) -> bool:
        cost = plan.prediction
        return cost is None or cost.fits(self.cap)

    def estimated(
        self, strategies: Sequence[Strategy], estimate: EstimateMesh, *, tried_first: bool
    ) -> list[MeshEstimate]:
        """Estimates of the meshes left to try, the most promising first.

        For autotuning, the best estimate of each untried mesh comes first, since errors of
        estimates correlate within a mesh.
        """
        found, over = list[MeshEstimate](), self.over
        fitting = filter(self.states_fit, strategies)
        open_ = [each for mesh in fitting for each in micro_batched(self.problem, mesh)]
        for done, strategy in enumerate(open_):
            best_s = step_s(self.best) if self.best is not None else 0.0
            name = f"bounds of {mesh_name(strategy)}"
            self.progress(SearchProgress(name, done, len(open_), best_s))
            if tried_first and model_ranks(strategy) == strategy.micro_batches == 1:
                continue
            accumulates = strategy.pp_size == 1 and (strategy.micro_batches or 1) > 1
            if tried_first and accumulates and not self.is_memory_bound():
                continue
            ended = not (self.context.deadline() and self.context.estimating())
            if over or (ended and (self.best is not None or found)):
                self.leave_out(strategy)
                continue
            try:
                own = estimate(replace(self.problem, strategy=strategy))
            except TimeIsOver:
                over = True
                self.leave_out(strategy)
                continue
            except (StrategyError, BatchError, CaptureError, ClusterError) as refusal:
                self.refusals.setdefault(mesh_name(strategy), refusal)
                continue
            if own.is_data_parallel and self.leaves_out_data_parallel():
                self.refusals.setdefault(mesh_name(strategy), StrategyError(UNDIVIDED))
                continue
            found.append(own)
            self.raise_bound(strategy, own.least_s)
        found.sort(key=lambda each: (each.step_s, each.least_bytes))
        if not self.autotunes:
            return found
        seen = {self.group(strategies[0])} if tried_first else set()
        first, rest = list[MeshEstimate](), list[MeshEstimate]()
        for each in found:
            (rest if self.group(each.strategy) in seen else first).append(each)
            seen.add(self.group(each.strategy))
        return first + rest

    def leaves_out_data_parallel(self) -> bool:
        """Whether meshes whose tp divides rows alone cannot be faster than the best plan.

        They can where parameters are gathered, which fewer ranks then do. Plans that will be run
        may be told apart by that.
        """
        gathers = self.best is not None and any(n == 3 for _, n in self.best.zero_stages)
        return "tp" in self.problem.strategy.search and not self.autotunes and not gathers

    def group(self, strategy: Strategy) -> str:
        """Group of a mesh in `without_gain`: its own when autotuning, else one for all."""
        return mesh_name(replace(strategy, micro_batches=None)) if self.autotunes else ""

    def may_improve(self, estimate: MeshEstimate) -> bool:
        assert self.best is not None
        best_s = step_s(self.best)
        patient = self.without_gain[self.group(estimate.strategy)] < PATIENCE
        likely = estimate.step_s < self.margin * MARGIN * best_s and patient
        return likely and estimate.least_s < self.margin * best_s

    def states_fit(self, strategy: Strategy) -> bool:
        """Whether parameters, gradients and states fit if axes of the model divide them evenly."""
        if self.cap is None:
            return True
        ranks = strategy.dp_shard or self.problem.world_size // model_ranks(strategy)
        states, gathered = self.least_bytes(ranks)
        least = states + (gathered if strategy.pp_size == 1 else 0.0)
        short = int(least / model_ranks(strategy)) - self.cap
        if short > 0:
            text = (
                f"nothing fits under {human_bytes(self.cap)} per rank: on {mesh_name(strategy)} "
                f"parameters, gradients and states alone need {human_bytes(short)} more"
            )
            self.failures.append(OutOfMemoryError(text, short, cap=self.cap))
        return short <= 0
