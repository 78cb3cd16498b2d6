"""Autotuning: benchmarks the top-ranked plans on the training ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.autotune.race import benchmark_plans, memory_budget
from autopar.autotune.select import NUM_PLANS, select_plans, with_measured_times
from autopar.cost_model.memory.optimizer_memory import Optimizer
from autopar.planner.machine import ranks_of
from autopar.planner.problem import PlanningProblem
from autopar.report.plan import Plan
from autopar.runtime.agreement.consensus import broadcast_from_rank0, is_multi_rank
from autopar.runtime.module import DistributedModule


def num_plans_to_benchmark(trials: int | None, problem: PlanningProblem) -> int:
    """Number of plans to benchmark: `trials`, or a default if the mesh is searched."""
    if not is_multi_rank():
        return 0
    searched = problem.world_size > 1 and bool(problem.strategy.search)
    return NUM_PLANS * searched if trials is None else trials


def plans_to_benchmark(
    device: torch.device, best: Plan, candidates: Iterable[Plan], count: int
) -> list[Plan]:
    """The plan with the best prediction, and others worth a benchmark.

    Args:
        device: device that the plans run on.
        best: the plan with the best prediction.
        candidates: candidates that rank 0 evaluated.
        count: number of plans to return.
    """
    if count <= 1 or best.prediction is None:
        return [best]
    budget = memory_budget(device, ranks_of(live=True).sharing)
    return broadcast_from_rank0(lambda: select_plans(best, candidates, count, budget))


def benchmark_and_pick(
    module: DistributedModule, plans: Sequence[Plan], call: Any, optimizer: Optimizer
) -> Plan:
    """The plan with the shortest measured step.

    Args:
        module: module without a plan.
        plans: plans to benchmark; a single plan is returned unchanged.
        call: arguments and keyword arguments of the call.
        optimizer: optimizer class or factory.
    """
    if len(plans) == 1:
        return plans[0]
    args, kwargs = call
    measured = benchmark_plans(module.copy_with_plan, plans, args, kwargs, optimizer)
    return with_measured_times(plans, measured.seconds, measured.rounds)
