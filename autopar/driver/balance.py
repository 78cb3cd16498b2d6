"""`balanced`: a plan whose ranks take rows of the batch in proportion to their speeds."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from autopar.planner.problem import PlanningProblem
from autopar.report.plan import Plan
from autopar.runtime.agreement.consensus import gather_objects, run_on_all_ranks
from autopar.runtime.module import why_not_balanced

ROUNDS = 3
"""Measurements, in each of which the same ranks must be slower."""

ROUND_S = 0.3
"""Seconds of a round, many times longer than a scheduler lets a neighbour have the core."""

WIDTH = {"cpu": 384, "cuda": 4096}
"""Width of the square matrices that are multiplied, by type of device."""

EQUAL = 1.05
"""Ratio of speeds up to which ranks count as equal."""


def balanced(plan: Plan, problem: PlanningProblem) -> Plan:
    """The plan with shares of rows by measured speed; all ranks call this at once.

    Raises:
        StrategyError: balance="measured" is asked for, and the plan has no rows to divide.
    """
    if problem.strategy.balance == "even" or plan.world_size == 1:
        return plan
    if (reason := why_not_balanced(plan)) is not None:
        raise reason
    times = run_on_all_ranks(lambda: [seconds_of_product(problem.device) for _ in range(ROUNDS)])
    return replace(plan, row_shares=shares_of(gather_objects(times)))


def seconds_of_product(device: torch.device) -> float:
    """Mean seconds of a matrix product, while all other ranks compute too."""
    width = WIDTH.get(device.type, WIDTH["cpu"])
    a, count = torch.ones(width, width, device=device), 0
    begin = time.perf_counter()
    while (passed := time.perf_counter() - begin) < ROUND_S:
        float((a @ a)[0, 0])  # waits for the device
        count += 1
    return passed / count


def shares_of(times: list[list[float]]) -> tuple[float, ...]:
    """Shares of rows from the times of each rank's rounds; () where ranks are equal.

    Ranks must differ in every round, since a neighbour may disturb a single one.
    """
    rounds = list(zip(*times, strict=True))
    if any(max(times) <= EQUAL * min(times) for times in rounds):
        return ()
    speeds = [1.0 / sorted(own)[len(own) // 2] for own in times]
    return tuple(round(speed / max(speeds), 3) for speed in speeds)
