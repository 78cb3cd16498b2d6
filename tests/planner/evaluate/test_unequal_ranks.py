"""Stages of ranks with different speeds: where the cuts are, and what is predicted."""

import pytest
import torch
from torch import nn

import autopar
from autopar.core.plan.prediction import StagePrediction
from autopar.cost_model.cluster.cluster import Cluster
from tests.planner.problems import evaluator_of, problem_of

SPEEDS = (1.0, 1.0, 0.5, 0.25)
"""Speeds of four ranks, two to a stage; the slowest of a stage counts."""


def stages(speeds: tuple[float, ...], **more: object) -> tuple[StagePrediction, ...]:
    """Predictions of two stages of equal blocks."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    strategy = autopar.Strategy(pp=2, micro_batches=2, zero=0, recompute="none", **more)  # type: ignore[arg-type]
    problem = problem_of(model, strategy, cluster=Cluster.named("dgx-h100"), speeds=speeds)
    _, candidate = evaluator_of(model, (torch.zeros(16, 64),), problem)
    return candidate.prediction.stages


def test_a_stage_takes_the_time_of_its_slowest_rank() -> None:
    equal, unequal = (stages(each, split_points=("6",)) for each in ((), SPEEDS))
    paces = [b.forward_s / a.forward_s for a, b in zip(equal, unequal, strict=True)]
    assert paces == pytest.approx([0.5, 2.0])  # 1 and 4 seconds, of a mean of 2
    assert [b.backward_s / a.backward_s for a, b in zip(equal, unequal, strict=True)] == (
        pytest.approx([0.5, 2.0])
    )


def test_cuts_follow_the_speeds() -> None:
    first, second = (each.parameter_bytes for each in stages(()))
    assert first == second
    first, second = (each.parameter_bytes for each in stages(SPEEDS))
    assert first >= 3 * second
