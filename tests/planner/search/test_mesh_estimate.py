"""Estimates of pipelines beside simulated ones, on cores of their own and on shared ones."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from autopar.core.plan.strategy import Strategy
from autopar.core.schedules import orders
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import ZERO_COST
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.simulator.pipeline import StageCost, simulate_pipeline
from autopar.planner.machine import Machine
from autopar.planner.search.mesh_estimate import (
    FORWARD_SHARE,
    MeshEstimate,
    MicroBatchFigures,
    estimate_mesh,
)
from tests.planner.problems import problem_of

COMPUTE_S = 1.2


def estimated(stages: int, micro_batches: int, relief: float) -> MeshEstimate:
    """Estimate of a model that only computes: it has no parameters and sends nothing."""
    cluster = Cluster.named("dgx-h100", 1)
    operators: Any = SimpleNamespace(relief=lambda ranks: relief)
    update: Any = SimpleNamespace(seconds=lambda sizes, *, dtensors: ZERO_COST)
    machine = Machine(cluster, operators, update, Overhead())
    strategy = Strategy(pp=stages, micro_batches=micro_batches, zero=0, recompute="none")
    problem = problem_of(nn.Linear(1, 1), strategy, world_size=stages, cluster=cluster)
    figures = MicroBatchFigures(COMPUTE_S, 0.0, 0.0, 0.0, 0.0, COMPUTE_S, 0.0)
    return estimate_mesh(problem, figures, machine)


def simulated_s(schedule: str, stages: int, micro_batches: int, relief: float, own: int) -> float:
    """Seconds with `own` stages on each rank."""
    each_s = COMPUTE_S / stages / own
    forward_s, backward_s = FORWARD_SHARE * each_s, (1 - FORWARD_SHARE) * each_s
    cost = StageCost(forward_s, backward_s, backward_s / 2, backward_s / 2)
    made = orders(schedule, stages, micro_batches, own)
    costs = [cost] * (stages * own)
    return simulate_pipeline(made, costs, lambda *_: 0.0, oversubscription=relief).step_s


@pytest.mark.parametrize("relief", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_is_estimated_as_it_is_simulated(stages: int, relief: float) -> None:
    """Ranks that wait leave shared cores to the others."""
    for micro_batches in (1, 2, 3, 8):
        estimate = estimated(stages, micro_batches, relief)
        step_s = simulated_s("gpipe", stages, micro_batches, relief, 1)
        assert estimate.step_s == pytest.approx(step_s)


@pytest.mark.parametrize("relief", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("schedule", "own"),
    [
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved", 2),
        ("zero_bubble", 1),
        ("zbv", 2),
        ("dualpipe_v", 2),
    ],
)
def test_no_schedule_is_faster_than_the_bound(
    schedule: str, own: int, stages: int, relief: float
) -> None:
    for micro_batches in (stages, 2 * stages):
        least_s = estimated(stages, micro_batches, relief).least_s
        step_s = simulated_s(schedule, stages, micro_batches, relief, own)
        assert least_s <= step_s * (1 + 1e-9)
