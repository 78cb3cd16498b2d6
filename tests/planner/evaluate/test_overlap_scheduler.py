"""Collectives scheduled one by one: as fast as link and compute allow, on the simulator's clock."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest

from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.compression import Compressions
from autopar.core.plan.overlap import Overlap
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import NO_SLOWDOWN
from autopar.cost_model.collectives import Link
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.simulator.step import Simulation, simulate
from autopar.passes.communication.overlap_units import AT_MARK, halves
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.planner.evaluate.overlap_scheduler import schedule
from tests.harness.models import MODELS
from tests.passes.parity import World

OPERATORS = replace(OperatorTimes.load("cpu"), times={}, alone={})  # by the roofline


@cache
def before(zero: int, compress: str = "") -> tuple[TrainingGraph, tuple[Pass, ...]]:
    """A GPT's graph in front of the pass, and the passes behind it."""
    it = World(MODELS["gpt"].make(), MODELS["gpt"].batch(8, 0), 2)
    plan = it.plan(zero)
    reduce = (compress,) * len(plan.buckets.reduce)
    none = ("",) * len(plan.buckets.gather), ("",) * len(plan.buckets.regather)
    plan = replace(plan, compressions=Compressions(*none, reduce))
    passes = build_pass_pipeline(plan, 0, "gloo")
    first = [isinstance(item, ScheduleOverlap) for item in passes].index(True)
    return run_passes(it.graph(0), passes[:first]), passes[first + 1 :]


def cluster(graph: TrainingGraph, behind: Sequence[Pass], share: float) -> Cluster:
    """Two nodes whose link takes `share` of the time that compute takes."""
    plain = replace(Cluster.default(2, "cpu"), ranks_per_node=1, slowdown=NO_SLOWDOWN)
    made = replace(plain, link=Link(0.0, 0.0, 1e6))
    result = run(graph, behind, made, ScheduleOverlap())
    rate = 1e6 * result.communication_s / (share * result.compute_s)
    return replace(plain, link=Link(0.0, 0.0, rate))


def run(
    graph: TrainingGraph, behind: Sequence[Pass], cluster: Cluster, overlap: ScheduleOverlap
) -> Simulation:
    return simulate(run_passes(graph, (overlap, *behind)), cluster, OPERATORS)


def scheduled(
    graph: TrainingGraph, behind: Sequence[Pass], cluster: Cluster, room: int | None = None
) -> Overlap:
    lowered = run_passes(graph, (ScheduleOverlap(), *behind))
    return schedule(graph, lowered, cluster, OPERATORS, room)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 1.0, 3.0])
@pytest.mark.parametrize(("zero", "compress"), [(3, ""), (0, "int8")])
def test_a_step_takes_what_the_slower_of_link_and_compute_does(
    zero: int, compress: str, share: float
) -> None:
    graph, behind = before(zero, compress)
    slow = cluster(graph, behind, share)
    planned = scheduled(graph, behind, slow)
    assert planned == scheduled(graph, behind, slow)
    result = run(graph, behind, slow, ScheduleOverlap(1, 2, (planned,)))
    forced = sum(item.dependence_s for item in result.exposures)
    bound = max(result.compute_s, result.communication_s) + forced
    assert result.step_s <= 1.1 * bound or share == 1.0  # then the halves are not balanced alike
    fixed = [run(graph, behind, slow, ScheduleOverlap(ahead, 2)).step_s for ahead in (0, 1, 2)]
    assert result.step_s <= 1.01 * min(fixed)


def test_with_no_room_one_gather_is_under_way() -> None:
    graph, behind = before(3)
    slow = cluster(graph, behind, 3.0)
    free, tight = (scheduled(graph, behind, slow, room) for room in (None, 0))
    assert sum(tight.gather) < sum(free.gather)
    forward, _ = halves(graph)
    pairs = zip(forward.of("early"), tight.gather, strict=True)
    spans = [(unit.mark + AT_MARK - lead, unit.mark + AT_MARK) for unit, lead in pairs]
    for start, end in spans:
        others = [span for span in spans if span != (start, end)]
        assert sum(begin <= start < until for begin, until in others) <= 1


def test_gathers_that_start_late_at_a_mark_can_be_read_back() -> None:
    graph, behind = before(3)
    with patch("autopar.planner.evaluate.overlap_scheduler.TICK", 2 * AT_MARK):
        found = scheduled(graph, behind, cluster(graph, behind, 1.0))
    assert min((*found.gather, *found.regather, *found.reduce)) >= 0
