"""`OfflineDriver`: plans for ranks that need not be running."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import nn

from autopar.capture.batch_slices import CaptureCache, capture_of_rank
from autopar.capture.call import last_part
from autopar.core.common.deadline import Deadline, TimeIsOver
from autopar.core.common.garbage import rare_collections
from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.plan import Plan
from autopar.core.plan.recompute import LEVELS, Level
from autopar.core.plan.search_outcome import DDP, FSDP, RECOMPUTED, PracticePlan
from autopar.core.plan.strategy import Strategy
from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    PlanError,
    StrategyError,
)
from autopar.formatting import human_bytes
from autopar.planner.evaluate.candidate import CandidateConfig, default_config
from autopar.planner.extended.extended_search import can_extend, plan_extended
from autopar.planner.extended.reduced_models import ReducedModels
from autopar.planner.extended.stage_blocks import UnevenStagesError
from autopar.planner.machine import Machine, absent
from autopar.planner.problem import Graphs, PlanningProblem, SearchContext
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.estimate_captures import MeshEstimator
from autopar.planner.search.measure_problem import measure_problem, needs_machine
from autopar.planner.search.mesh_search import EstimateMesh
from autopar.planner.search.oom_advice import on_more_ranks, plan_or_advise
from autopar.planner.search.pipeline_search import capture_micro_batches
from autopar.planner.search.practice import (
    NO_TIME,
    PracticeLayout,
    megatrons,
    practice,
    priced,
    why_not,
)
from autopar.planner.search.search_progress import ReportProgress, TooCostlyError
from autopar.session.driver import Driver

ESTIMATES_SHARE = 0.5
"""Fraction of the time limit for estimates of meshes."""

MEASURING_SHARE = 0.1
"""Fraction of the time limit for the operators of a mesh on this machine."""

PROOFS_SHARE = 0.75
"""Fraction of the time limit after which no mesh is planned only for a tighter bound."""

WHOLE_SHARE = 1 / 3
"""Most of the time limit that is kept for lowering the best plan whole, as a fraction."""

SPARE = 2.0
"""Ratio of the time kept for that to the expected one: a mesh under way ends a little later."""

LOWERING_RATIO = 3.0
"""Seconds to capture a model and to lower it in micro-batches over the seconds to capture it."""

PIPELINE_RATIO = 40
"""The same with the configurations and schedules of a pipeline, of a GPT under a cap."""


class OfflineDriver(Driver):
    """Captures, measures and plans in one process, for ranks that need not be running."""

    def __init__(
        self,
        problem: PlanningProblem,
        model: nn.Module,
        example_inputs: Any,
        autocast: torch.dtype | None,
        loss_fn: Callable[..., Any] | None,
        deadline: Deadline,
        progress: ReportProgress,
    ) -> None:
        super().__init__(problem.strategy, deadline, progress=progress)
        self.model = model
        self._capture_rank = functools.partial(
            capture_of_rank,
            model,
            example_inputs,
            0,
            batch=problem.batch,
            autocast=autocast,
            loss_fn=loss_fn,
            local=problem.strategy.batch_semantics == "local",
            comm_backend=problem.comm_backend,
            gathers_rows=problem.batch == "global",
        )
        self._machines: dict[tuple[str, int], Machine] = {}
        self._capture = functools.cache(self._capture_micro_batch)

        self._models = ReducedModels(model, problem.blocks, self._capture_reduced)
        self._cache = self._models.captures.setdefault((), {})
        self._extended: dict[str, tuple[PlanningProblem, CandidateConfig]] = {}
        self._node_s: list[float] = []
        self._estimator: MeshEstimator

    def advises(self) -> bool:
        """Whether there is time to plan with changes where nothing fits."""
        return self.deadline() and not self._models.alone

    def capture(self, problem: PlanningProblem) -> Graphs:
        capture = functools.partial(self._capture, problem.dp_size)
        return capture_micro_batches(problem.strategy, capture)

    def measure(self, problem: PlanningProblem, graphs: Graphs) -> Machine | None:
        if self._is_absent(problem):
            return self._absent_machine(problem)
        limit_s = self.deadline.part(MEASURING_SHARE).left_s
        return measure_problem(problem, graphs, limit_s=limit_s)

    def estimator(self, problem: PlanningProblem) -> tuple[PlanningProblem, EstimateMesh]:
        self._estimator = MeshEstimator(
            problem, self._capture_slice, self.model, captures=self._models.captures
        )
        return problem, self._estimator

    def search_context(self, context: SearchContext) -> SearchContext:
        if self.deadline.limit_s is None:
            return context
        return replace(
            context,
            deadline=self._searching,
            estimating=self.deadline.part(ESTIMATES_SHARE),
            proving=self.deadline.part(PROOFS_SHARE),
            floor_s=self._estimator.floor_s,
            timed=True,
        )

    def plan_mesh(
        self,
        problem: PlanningProblem,
        context: SearchContext,
        first: CandidateConfig | None = None,
    ) -> Plan:
        """The plan of a mesh; by arithmetic from few blocks where time is limited."""
        if self.deadline.limit_s is not None:
            return self._few_or_whole(problem, context, first)
        return super().plan_mesh(problem, context, first)

    def _few_or_whole(
        self,
        problem: PlanningProblem,
        context: SearchContext,
        first: CandidateConfig | None = None,
    ) -> Plan:
        """The plan of a mesh, by arithmetic where few blocks tell of it."""
        if can_extend(problem, self._models) and self._is_absent(problem):
            # Stages that few blocks do not tell of, and micro-batches that differ by a row, are
            # lowered whole. So is a model that does not run with fewer blocks.
            with contextlib.suppress(UnevenStagesError, BatchError, CaptureError):
                return self._plan_extended(problem, context)
        if self.deadline.armed and self._whole_s(problem.strategy.stages) > self.deadline.left_s:
            raise TooCostlyError("lowering takes longer than the time that is left")
        return super().plan_mesh(problem, context, first)

    def _plan_extended(self, problem: PlanningProblem, context: SearchContext) -> Plan:
        """The plan of a mesh by arithmetic; its configuration is kept for `refine`."""
        machine = self._absent_machine(problem)
        own = self.deadline.part(self.share)
        context = replace(context, deadline=lambda: own() and self._searching())
        best = plan_extended(problem, self._models, machine, context)
        if (pipeline := best.plan.pipeline) is not None and pipeline.stages > 1:
            fixed = replace(
                problem.strategy,
                micro_batches=pipeline.micro_batches,
                schedule=pipeline.schedule,  # type: ignore[arg-type]
                stages_per_rank=pipeline.stages_per_rank,
            )
            problem = replace(problem, strategy=fixed)
        # Plans of several meshes may have one name; their decisions tell them apart.
        self._extended[best.plan.digest()] = problem, best.config
        return best.plan

    def refine(self, plan: Plan) -> Plan | None:
        if not plan.bucket_bytes or self._models.alone:
            return None
        stages = plan.pipeline.stages if plan.pipeline is not None else 1
        if stages > 1 and self._whole_s(stages) > self.deadline.left_s:
            return None
        extended = self._extended.pop(plan.digest(), None)
        if extended is None:
            return None
        problem, config = extended
        lowered: list[Plan] = []
        context = SearchContext(baseline=self.baseline, on_candidate=lowered.append)
        try:
            return super().plan_mesh(problem, context, config)
        except TimeIsOver:
            return _too_large(lowered[0], problem) if lowered else None

    def with_outcome(self, plan: Plan, problem: PlanningProblem) -> Plan:
        """Also predicts DDP and fully_shard, where the search did not."""
        if plan.prediction is not None:
            known = self.baseline.fastest
            if DDP not in known:
                self._predict_baseline(problem, 0, LEVELS[:1])
            if FSDP not in known:
                self._predict_baseline(problem, 3, LEVELS[:1])
            if not any(self.baseline.fits(known.get(name)) for name in (FSDP, RECOMPUTED)):
                self._predict_baseline(problem, 3, LEVELS[1:])
        return super().with_outcome(plan, problem)

    def layouts(self, problem: PlanningProblem) -> Sequence[PracticeLayout]:
        cluster = problem.cluster
        if cluster is None or not self._is_absent(problem):
            return ()
        return [*practice(problem, cluster.ranks_per_node, problem.cap_on(cluster))]

    def megatrons(self, problem: PlanningProblem) -> PracticePlan:
        """Megatron's layout, from few blocks where that is possible."""
        unpriced, cluster = super().megatrons(problem), problem.cluster
        if problem.world_size == 1 or cluster is None or not self._is_absent(problem):
            return unpriced
        for layout in megatrons(problem, cluster.ranks_per_node, problem.cap_on(cluster)):
            if not self.deadline():
                return replace(unpriced, why=NO_TIME)
            own = replace(problem, strategy=layout.strategy)
            try:
                return priced(layout, self._few_or_whole(own, SearchContext()))
            except (AutoparError, TimeIsOver) as error:
                unpriced = replace(unpriced, why=why_not(error))
        return unpriced

    def _predict_baseline(
        self, problem: PlanningProblem, stage: int, levels: Sequence[Level]
    ) -> None:
        """Lowers the whole model at each level of recomputation, until one fits.

        It does so where nothing has to be measured and time is left.
        """
        strategy = Strategy(
            zero=stage, recompute="none", batch_semantics=problem.strategy.batch_semantics
        )
        problem = replace(problem, strategy=strategy)
        if problem.world_size == 1 or not self._is_absent(problem) or self._models.alone:
            return
        if self._whole_s() > self.deadline.left_s:
            return
        context = SearchContext(baseline=self.baseline)
        with contextlib.suppress(
            StrategyError, BatchError, TimeIsOver
        ):  # too few rows, or too little time
            graph = self.capture(problem)[1]
            evaluator = build_evaluator(problem, graph, self._absent_machine(problem), context)
            for level in levels:
                own = replace(strategy, recompute=level)
                candidate = evaluator.evaluate(default_config(own, problem.blocks, stage))
                if candidate.fits(self.baseline.cap):
                    return

    def _is_absent(self, problem: PlanningProblem) -> bool:
        priced = needs_machine(problem, live=False) and problem.cluster is not None
        return priced and absent(problem.device, problem.cluster)

    def _absent_machine(self, problem: PlanningProblem) -> Machine:
        """The machine of a cluster that is not here; all its times are modelled."""
        key = str(problem.cluster.name if problem.cluster else ""), problem.world_size
        if key not in self._machines:
            machine = measure_problem(problem, {})
            assert machine is not None
            self._machines[key] = machine
        return self._machines[key]

    def _searching(self) -> bool:
        """Whether time is left to search, beside what lowering the best plan whole takes.

        No time is kept for a large model, which is unlikely to be lowered in time.
        """
        kept_s, limit_s = SPARE * self._whole_s(), self.deadline.limit_s or 0.0
        keeps = kept_s <= WHOLE_SHARE * limit_s and not self._models.alone
        return self.deadline.left_s > (kept_s if keeps else 0.0)

    def _whole_s(self, stages: int = 1) -> float:
        """Expected seconds to capture and lower the whole model; 0 if nothing is known.

        The first capture of a process also imports and compiles. Of the others the slowest counts
        for pipelines, which are not worth a try that fails, and else the median.
        """
        known = self._node_s[1:] or self._node_s
        if not known:
            return 0.0
        seconds = median(known) * LOWERING_RATIO
        if stages > 1:
            seconds = max(known) * PIPELINE_RATIO
        return seconds * self._models.whole_nodes()

    def _capture_micro_batch(self, ranks: int, micro_batches: int, even: bool) -> TrainingGraph:
        return self._capture_rank(ranks, micro_batches=micro_batches, cache=self._cache, even=even)

    def _capture_reduced(
        self, ranks: int, micro_batches: int, cache: CaptureCache
    ) -> TrainingGraph:
        begin_s = self.deadline.clock()
        graph = self._capture_rank(ranks, micro_batches=micro_batches, cache=cache)
        seconds = self.deadline.clock() - begin_s
        self._node_s.append(seconds / len(graph.graph.nodes))
        return graph

    def _capture_slice(self, slices: int, cache: CaptureCache) -> TrainingGraph:
        return self._capture_rank(slices, cache=cache, in_time=slices > 1)


def _too_large(whole: Plan, problem: PlanningProblem) -> Plan | None:
    """A lowered plan that does not fit, with a note; None if it does."""
    cap, cost = problem.cap_on(problem.cluster), whole.prediction
    if cap is None or cost is None or cost.fits(cap):
        return None
    over = human_bytes(cost.needed_bytes - cap)
    note = f"does not fit: it needs {over} more than the cap, and no time was left to change it"
    return replace(whole, notes=(*whole.notes, note))


def plan_offline(
    problem: PlanningProblem,
    model: nn.Module,
    example_inputs: Any,
    autocast: torch.dtype | None,
    loss_fn: Callable[..., Any] | None,
    time_limit_s: float | None,
    progress: ReportProgress,
) -> Plan:
    """The fastest plan of a problem found in time, or an error that says what would help.

    Ctrl-C ends the time. It raises KeyboardInterrupt only if no plan is known by then.

    Raises:
        OutOfMemoryError: nothing fits.
        PlanError: no plan was found in time.
    """
    deadline = Deadline(time_limit_s)

    def driver_for(inputs: Any) -> OfflineDriver:
        return OfflineDriver(problem, model, inputs, autocast, loss_fn, deadline, progress)

    driver = driver_for(example_inputs)

    def replan(factor: int, parts: int) -> Plan:
        other = driver_for(last_part(example_inputs, parts)) if parts > 1 else driver
        return other.plan(on_more_ranks(problem, factor))

    try:
        with deadline.enforced(), rare_collections():
            return plan_or_advise(problem, driver.plan, replan, deadline=driver.advises)
    except TimeIsOver:
        if deadline.interrupted:
            raise KeyboardInterrupt from None
        raise PlanError(
            f"no plan of {problem.model} was found within time_limit_s={time_limit_s:g}: give more "
            "time, or a strategy that leaves less open, such as zero3"
        ) from None
