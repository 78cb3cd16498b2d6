"""`OfflineDriver`: plans for ranks that need not be running."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.capture.batch_slices import CaptureCache, capture_of_rank
from autopar.capture.call import last_part
from autopar.common.deadline import Deadline, TimeIsOver
from autopar.driver.driver import Driver
from autopar.errors import PlanError
from autopar.ir.graph import TrainingGraph
from autopar.planner.machine import Machine
from autopar.planner.problem import Graphs, PlanningProblem
from autopar.planner.search.estimate_captures import MeshEstimator
from autopar.planner.search.measure_problem import measure_problem
from autopar.planner.search.mesh_search import EstimateMesh, ReportProgress
from autopar.planner.search.oom_advice import on_more_ranks, plan_or_advise
from autopar.planner.search.pipeline_search import capture_micro_batches
from autopar.report.plan import Plan


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
        )
        self._cache: CaptureCache = {}
        self._capture = functools.cache(self._capture_micro_batch)

    def capture(self, problem: PlanningProblem) -> Graphs:
        capture = functools.partial(self._capture, problem.dp_size)
        return capture_micro_batches(problem.strategy, capture)

    def measure(self, problem: PlanningProblem, graphs: Graphs) -> Machine | None:
        return measure_problem(problem, graphs, live=False)

    def estimator(self, problem: PlanningProblem) -> tuple[PlanningProblem, EstimateMesh]:
        return problem, MeshEstimator(problem, self._capture_slice, self.model)

    def _capture_micro_batch(self, ranks: int, micro_batches: int) -> TrainingGraph:
        return self._capture_rank(ranks, micro_batches=micro_batches, cache=self._cache)

    def _capture_slice(self, slices: int, cache: CaptureCache) -> TrainingGraph:
        return self._capture_rank(slices, cache=cache, in_time=slices > 1)


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
    rest = autocast, loss_fn, deadline, progress
    driver = OfflineDriver(problem, model, example_inputs, *rest)

    def replan(factor: int, parts: int) -> Plan:
        other = driver
        if parts > 1:
            other = OfflineDriver(problem, model, last_part(example_inputs, parts), *rest)
        return other.plan(on_more_ranks(problem, factor))

    try:
        with deadline.enforced():
            return plan_or_advise(problem, driver.plan, replan, deadline=deadline)
    except TimeIsOver:
        if deadline.interrupted:
            raise KeyboardInterrupt from None
        raise PlanError(
            f"no plan of {problem.model} was found within time_limit_s={time_limit_s:g}: give more "
            "time, or a strategy that leaves less open, such as zero3"
        ) from None
