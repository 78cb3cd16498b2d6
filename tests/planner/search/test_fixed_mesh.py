"""Partitions of fewer bytes, where the fastest does not fit."""

from dataclasses import replace

import pytest

from autopar.errors import OutOfMemoryError
from autopar.plan.strategy import Strategy
from autopar.planner.search.fixed_mesh import LEANER, else_leaner
from autopar.report.plan import Plan
from tests.harness.models import MODELS
from tests.planner.problems import problem_of


def plan_with(memory: int | None) -> Plan:
    if memory is None:
        raise OutOfMemoryError("", 7)
    return replace(problem_of(MODELS["gpt"].make(), Strategy(tp=2)).base(), memory_cap=memory)


def test_the_fewest_bytes_follow_the_fastest_partition() -> None:
    plan = else_leaner(Strategy(tp=2), plan_with)
    assert (plan.memory_cap, plan.notes) == (0, (LEANER,))
    with pytest.raises(OutOfMemoryError):
        else_leaner(Strategy(zero=3), plan_with)  # nothing is partitioned
