"""Speeds of ranks, and `balanced`: a plan that divides rows or stages in proportion to them."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from autopar.core.plan.plan import Plan
from autopar.planner.problem import PlanningProblem
from autopar.runtime.agreement.consensus import gather_objects, run_on_all_ranks
from autopar.runtime.watch.balance import why_not_balanced

ROUNDS = 3
"""Measurements, in each of which the same ranks must be slower."""

ROUND_S = 0.3
"""Seconds of a round, many times longer than a scheduler lets a neighbour have the core."""

WIDTH = {"cpu": 384, "cuda": 4096}
"""Width of the square matrices that are multiplied, by type of device."""

EQUAL = 1.05
"""Ratio of speeds up to which ranks count as equal."""


def with_speeds(problem: PlanningProblem) -> PlanningProblem:
    """The problem with measured speeds, where balance="measured" asks for them.

    All ranks call this at once.
    """
    if problem.strategy.balance == "even" or problem.world_size == 1:
        return problem
    times = run_on_all_ranks(lambda: [seconds_of_product(problem.device) for _ in range(ROUNDS)])
    return replace(problem, speeds=speeds_of(gather_objects(times)))


def balanced(plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan with shares of rows by speed, unless its stages were cut by speed.

    Raises:
        StrategyError: balance="measured" is asked for, and the plan has nothing to divide.
    """
    strategy = problem.strategy
    if strategy.balance == "even" or plan.world_size == 1:
        return plan
    if plan.pipeline is not None and plan.pipeline.ranks > 1 and strategy.split_points is None:
        return plan
    if (reason := why_not_balanced(plan)) is not None:
        raise reason
    return replace(plan, row_shares=problem.speeds)


def seconds_of_product(device: torch.device) -> float:
    """Mean seconds of a matrix product, while all other ranks compute too."""
    width = WIDTH.get(device.type, WIDTH["cpu"])
    a, count = torch.ones(width, width, device=device), 0
    begin = time.perf_counter()
    while (passed := time.perf_counter() - begin) < ROUND_S:
        float((a @ a)[0, 0])  # waits for the device
        count += 1
    # a mean, since the fastest product misses a neighbour that takes half of a core
    return passed / count


def speeds_of(times: list[list[float]]) -> tuple[float, ...]:
    """Speeds relative to the fastest, from times of each rank's rounds; () where ranks are equal.

    Ranks must differ in every round, since a neighbour may disturb a single one.
    """
    rounds = list(zip(*times, strict=True))
    if any(max(times) <= EQUAL * min(times) for times in rounds):
        return ()
    speeds = [1.0 / sorted(own)[len(own) // 2] for own in times]
    return tuple(round(speed / max(speeds), 3) for speed in speeds)
