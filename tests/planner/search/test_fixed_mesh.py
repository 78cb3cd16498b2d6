"""Partitions of fewer bytes, where the fastest does not fit."""

from dataclasses import replace

import pytest

from autopar.core.plan.prediction import Prediction
from autopar.core.plan.strategy import Strategy
from autopar.errors import OutOfMemoryError
from autopar.planner.evaluate.candidate import Candidate, default_config
from autopar.planner.search.fixed_mesh import LEANER, else_leaner
from tests.harness.models import MODELS
from tests.planner.problems import problem_of


def find(memory: int | None) -> Candidate:
    if memory is None:
        raise OutOfMemoryError("", 7)
    problem = problem_of(MODELS["gpt"].make(), Strategy(tp=2))
    cost = Prediction(1.0, 0.1, 0.7, 0.3, 0.2, 9)
    config = default_config(problem.strategy, problem.blocks, 0)
    return Candidate(config, replace(problem.base(), memory_cap=memory), cost)


def test_the_fewest_bytes_follow_the_fastest_partition() -> None:
    plan = else_leaner(Strategy(tp=2), find).plan
    assert (plan.memory_cap, plan.notes) == (0, (LEANER,))
    with pytest.raises(OutOfMemoryError):
        else_leaner(Strategy(zero=3), find)  # nothing is partitioned
