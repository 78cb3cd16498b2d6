"""Trials: plans that are predicted to be nearly as fast as the best, run where they would train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.autotune.race import benchmark_plans, copies_that_fit
from autopar.autotune.select import TRIALS, autotune_candidates, with_measured_times
from autopar.cost_model.memory.optimizer_memory import Optimizer
from autopar.planner.machine import ranks_of
from autopar.planner.search.fixed_mesh import PlanningProblem
from autopar.report.plan import Plan
from autopar.runtime.agreement.consensus import broadcast_from_rank0, is_multi_rank
from autopar.runtime.module import DistributedModule


def num_plans_to_benchmark(trials: int | None, problem: PlanningProblem) -> int:
    """How many plans are tried, if somebody says so or the mesh is searched; 0 for none."""
    if not is_multi_rank():
        return 0
    several = problem.world_size > 1 and bool(problem.strategy.search)
    return TRIALS * several if trials is None else trials


def plans_to_benchmark(problem: PlanningProblem, plan: Plan, trials: int) -> list[Plan]:
    """The plan chosen by prediction, and behind it those that are worth a trial beside it."""
    rivals = problem.autotune_candidates
    if rivals is None or plan.prediction is None:
        return [plan]
    free = copies_that_fit(problem.device, ranks_of(live=True).sharing)
    return broadcast_from_rank0(lambda: autotune_candidates(plan, rivals, trials, free))


def benchmark_and_pick(
    module: DistributedModule, plans: Sequence[Plan], call: Any, optimizer: Optimizer
) -> Plan:
    """The plan that is fastest where it runs.

    Args:
        module: that has no plan yet.
        plans: to try; one alone is taken.
        call: its arguments and keyword arguments.
        optimizer: class or factory.
    """
    if len(plans) == 1:
        return plans[0]
    args, kwargs = call
    timed = benchmark_plans(module.copy_with_plan, plans, args, kwargs, optimizer)
    return with_measured_times(plans, timed.seconds, timed.rounds)
