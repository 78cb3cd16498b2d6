"""`Driver`: captures, measures and plans one call of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.core.common.deadline import Deadline
from autopar.core.plan.plan import Plan
from autopar.core.plan.search_outcome import (
    DDP,
    FSDP,
    MEGATRONS,
    RECOMPUTED,
    PracticePlan,
    SearchOutcome,
)
from autopar.core.plan.strategy import Strategy
from autopar.planner.baseline import Baseline
from autopar.planner.evaluate.candidate import CandidateConfig
from autopar.planner.machine import Machine
from autopar.planner.problem import Graphs, PlanningProblem, SearchContext
from autopar.planner.search.fixed_mesh import plan_fixed_mesh
from autopar.planner.search.mesh_search import EstimateMesh, fastest_mesh
from autopar.planner.search.practice import PracticeLayout
from autopar.planner.search.search_progress import ReportProgress
from autopar.planner.search.state_bytes import ddp_state_bytes

MESH_SHARE = 0.2
"""Fraction of the time limit for improving on the first plan of one of several meshes."""

NOT_PREDICTED = "not predicted"

T = TypeVar("T")


class Driver(ABC):
    """Captures, measures and plans one call of a model.

    Graphs and machines are cached by strategy and world size: planning again under another memory
    cap repeats neither.

    Attributes:
        deadline: end of the search.
        on_candidate: called with every candidate plan, if anybody observes the search.
        progress: called before every mesh that is planned.
    """

    def __init__(
        self,
        strategy: Strategy,
        deadline: Deadline,
        on_candidate: Callable[[Plan], None] | None = None,
        progress: ReportProgress = lambda progress: None,
    ) -> None:
        self.deadline, self.share = deadline, MESH_SHARE if strategy.search else 1.0
        self.on_candidate, self.progress = on_candidate, progress
        self._prepared: dict[tuple[str, int], tuple[Graphs, Machine | None]] = {}

    @abstractmethod
    def capture(self, problem: PlanningProblem) -> Graphs:
        """Captures a micro-batch for every number of micro-batches that may be chosen."""

    @abstractmethod
    def measure(self, problem: PlanningProblem, graphs: Graphs) -> Machine | None:
        """Measures the machine on these graphs; None if the plan does not depend on it."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """The fastest plan over all meshes that the strategy leaves open.

        Raises:
            OutOfMemoryError: nothing fits.
        """
        self.baseline = Baseline(problem.cap_on(problem.cluster))
        context = SearchContext(
            lambda: self.decide(self.deadline),
            on_candidate=self.on_candidate,
            baseline=self.baseline,
        )
        if not problem.strategy.search:
            plan = self.plan_mesh(problem, context)
            return self.with_outcome(self.refine(plan) or plan, problem)
        problem, estimate = self.estimator(problem)
        assert problem.cluster is not None
        self.baseline.cap = problem.cap_on(problem.cluster)
        found = fastest_mesh(
            problem,
            self.plan_mesh,
            lambda candidate: self.decide(lambda: estimate(candidate)),
            problem.cluster.ranks_per_node,
            self.search_context(context),
            self.progress,
            self.refine,
            self.layouts(problem),
        )
        return self.with_outcome(found, problem)

    def search_context(self, context: SearchContext) -> SearchContext:
        """The limits of a search over meshes."""
        return context

    def refine(self, plan: Plan) -> Plan | None:
        """A plan predicted by arithmetic, lowered whole; None if it is, or if time lacks."""
        return None

    def with_outcome(self, plan: Plan, problem: PlanningProblem) -> Plan:
        """The plan of a problem with usual plans by name, and the extent of the search."""
        if (cost := plan.prediction) is None:
            return plan
        known, outcome = self.baseline, plan.search or SearchOutcome()
        uneven = problem.rows % problem.world_size
        why = f"{problem.rows:,} rows do not divide over all ranks" if uneven else NOT_PREDICTED
        held_bytes = ddp_state_bytes(problem.parameters.values(), problem.state_ratio)
        best, ddp, fsdp, usual = self.decide(
            lambda: (
                known.best,
                known.runner_up(cost, DDP),
                known.runner_up(cost, FSDP, RECOMPUTED),
                tuple(known.usual(held_bytes, why)) if known.fastest or outcome.looked else (),
            )
        )
        practice = {each.name: each for each in (*usual, *outcome.practice)}
        if practice and MEGATRONS not in practice:
            practice[MEGATRONS] = self.megatrons(problem)
        order = sorted(practice.values(), key=lambda each: each.name != MEGATRONS)
        named = (*usual, *(each for each in order if each not in usual))
        found = replace(outcome, ddp=ddp, fsdp=fsdp, practice=named)
        if best is not None and best.prediction is not None:
            found = replace(found, baseline=best.name, baseline_s=best.prediction.step_s)
        note = cost.work.note(plan.world_size) if cost.work is not None else None
        return replace(plan, search=found, notes=(*plan.notes, *([note] if note else [])))

    def plan_mesh(
        self,
        problem: PlanningProblem,
        context: SearchContext,
        first: CandidateConfig | None = None,
    ) -> Plan:
        """The fastest plan of a fixed mesh, near the configuration `first` if that can fit."""
        key = str(problem.strategy), problem.world_size
        if key not in self._prepared:
            graphs = self.capture(problem)
            self._prepared[key] = graphs, self.measure(problem, graphs)
        prepared = self._prepared[key]
        context = replace(context, deadline=self.deadline.part(self.share))
        return self.decide(lambda: plan_fixed_mesh(problem, *prepared, context, first))

    def layouts(self, problem: PlanningProblem) -> Sequence[PracticeLayout]:
        """Usual layouts that a search tries first; none where each has to be measured."""
        return ()

    def megatrons(self, problem: PlanningProblem) -> PracticePlan:
        """The price of Megatron's layout where a strategy excludes it."""
        return PracticePlan(MEGATRONS, why=NOT_PREDICTED)

    @abstractmethod
    def estimator(self, problem: PlanningProblem) -> tuple[PlanningProblem, EstimateMesh]:
        """The problem with its cluster, and a function that estimates its meshes."""

    def decide(self, choose: Callable[[], T]) -> T:
        """The result of a choice that all ranks must share."""
        return choose()
