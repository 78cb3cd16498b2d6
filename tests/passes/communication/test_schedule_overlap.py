import random
from dataclasses import replace
from itertools import pairwise
from operator import getitem

import pytest
from expecttest import assert_expected_inline
from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.mesh_levels import Levels
from autopar.core.plan.layout import Layout
from autopar.core.plan.overlap import Overlap
from autopar.core.plan.plan import Plan
from autopar.passes.communication.bucket_collectives import BucketCollectives
from autopar.passes.communication.hierarchical_collectives import PARTS
from autopar.passes.communication.overlap_units import Half, Kind, halves
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.collective_ops import (
    STARTS,
    start_all_gather,
    starts,
    tagged,
    wait,
    wait_of,
)
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.pipeline import build_pass_pipeline
from tests.harness.models import MODELS
from tests.passes.golden import order, two_layers
from tests.passes.parity import AXIS, World, assert_parity

PRODUCTS = ("mm", "mm_1", "mm_2", "mm_3", "mm_4")


def before(it: World, rank: int, stage: int = 3) -> tuple[Pass, ...]:
    stages = tuple((p.block, stage) for p in it.parameters.values())
    return (
        AssignBatchAxis(AXIS),
        ShardParameters(AXIS, rank, (*stages, ("", stage))),
        SynchronizeGradients(AXIS, rank),
    )


def milestone(node: fx.Node) -> bool:
    return node.target in (*STARTS, wait) or node.name in PRODUCTS


def scheduled(it: World, *options: int, stage: int = 3) -> TrainingGraph:
    return run_passes(it.graph(0), [*before(it, 0, stage), ScheduleOverlap(*options)])


def test_gathers_ahead_and_reductions_late() -> None:
    """The second weight is under way during the first product; gradients until the end."""
    assert_expected_inline(
        order(scheduled(two_layers(), 1, 0), milestone),
        """\
f start_all_gather
f start_all_gather_1
f wait_1
f mm
f wait_2
f mm_1
f start_all_reduce
f wait
b mm_2
b mm_3
b start_reduce_scatter_1
b mm_4
b start_reduce_scatter
b wait_4
b wait_3""",
    )


def test_no_prefetch_and_one_reduction_in_flight() -> None:
    assert_expected_inline(
        order(scheduled(two_layers(), 0, 1), milestone),
        """\
f start_all_gather
f wait_1
f mm
f start_all_gather_1
f wait_2
f mm_1
f start_all_reduce
f wait
b mm_2
b mm_3
b start_reduce_scatter_1
b mm_4
b wait_4
b start_reduce_scatter
b wait_3""",
    )


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_so_many_gathers_are_under_way(prefetch: int) -> None:
    it = World(MODELS["gpt"].make(), MODELS["gpt"].batch(2, 0), 2)
    graph = scheduled(it, prefetch)
    under_way = most = 0
    for node in graph.calls():
        if node.target is start_all_gather:
            most = max(most, under_way := under_way + 1)
        elif node.target is wait and node.args[0].target is start_all_gather:  # type: ignore
            under_way -= 1
    assert most == prefetch + 1


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_so_many_reductions_are_under_way(in_flight: int) -> None:
    it = World(MODELS["gpt"].make(), MODELS["gpt"].batch(2, 0), 2)
    graph = scheduled(it, 1, in_flight, stage=0)
    reductions = [start for start in starts(graph) if "gradient" in start.meta]
    nodes = list(graph.graph.nodes)
    ends = [nodes.index(wait_of(start)) for start in reductions]
    begins = [nodes.index(start) for start in reductions]
    for begin in begins:
        under_way = sum(b <= begin < e for b, e in zip(begins, ends, strict=True))
        assert under_way <= in_flight


@pytest.mark.parametrize("stage", [0, 2])
def test_buckets_of_gradients_are_waited_for_late_too(stage: int) -> None:
    it = World(MODELS["gpt"].make(), MODELS["gpt"].batch(2, 0), 2)
    plan = it.plan(stage)
    buckets = [group for group in plan.buckets.reduce if len(group) > 1]
    graph = run_passes(
        it.graph(0),
        [*before(it, 0, stage), BucketCollectives(plan.buckets), ScheduleOverlap(1, 1)],
    )
    nodes = list(graph.graph.nodes)
    merged = [s for s in starts(graph) if len(tagged(s, "gradient")) > 1]
    assert len(merged) == len(buckets) > 1
    for start, later in pairwise(s for s in starts(graph) if tagged(s, "gradient")):
        between = nodes[nodes.index(start) + 1 : nodes.index(wait_of(start))]
        assert wait_of(start) < later
        assert any(node.target not in (getitem, wait) for node in between)


def test_ranks_start_their_collectives_alike() -> None:
    it = two_layers(ranks=3, rows=7, bias=True)
    graphs = it.lower(lambda rank: (*before(it, rank), ScheduleOverlap(2, 1)))
    assert len({tuple(start.name for start in starts(graph)) for graph in graphs}) == 1
    assert_parity(it, graphs)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_whatever_is_planned_is_exact(ranks: int, stage: int) -> None:
    """Ranks of uneven rows start alike, nothing is read before it is there; four send by level."""
    it = two_layers(ranks, 2 * ranks + 1, bias=True)
    by_level = Levels(AXIS, 2, tuple((kind, 0) for kind in PARTS))
    plan = it.plan(stage, bucket=1, levels=(by_level,) if ranks == 4 else ())
    captured = [replace(it.graph(rank), axes=Layout(plan).axes) for rank in range(ranks)]

    def lowered(plan: Plan) -> list[TrainingGraph]:
        return [
            run_passes(g, build_pass_pipeline(plan, rank, "gloo"))
            for rank, g in enumerate(captured)
        ]

    passes = build_pass_pipeline(plan, 0, "gloo")
    first = [isinstance(item, ScheduleOverlap) for item in passes].index(True)
    forward, backward = halves(run_passes(captured[0], passes[:first]))
    rng = random.Random(10 * stage + ranks)

    def some(half: Half, kind: Kind) -> tuple[float, ...]:
        return tuple(rng.choice((0.0, 0.5, 3.7, rng.uniform(0, 9))) for _ in half.of(kind))

    early = some(forward, "early"), some(backward, "early")
    planned = replace(plan, overlaps=(Overlap(*early, some(backward, "late")),))
    graphs = lowered(planned)
    before = run_passes(captured[0], passes)
    assert [n.name for n in before.calls()] != [n.name for n in graphs[0].calls()]
    assert_parity(it, graphs)


def test_what_lies_between_two_levels_sinks_with_the_second() -> None:
    """The sum between nodes starts behind compute that hides the one within, not at once."""
    it = two_layers(4, 4)
    plan = it.plan(0, bucket=1, levels=(Levels(AXIS, 2, tuple((kind, 0) for kind in PARTS)),))
    passes = build_pass_pipeline(plan, 0, "gloo")
    first = [isinstance(item, ScheduleOverlap) for item in passes].index(True)
    before = run_passes(replace(it.graph(0), axes=Layout(plan).axes), passes[:first])
    _, backward = halves(before)
    chains = [unit for unit in backward.of("late") if unit.start is not None]
    assert [unit.level for unit in chains] == [0, 1, 2] * 2
    delays = [0.0 if unit.level == 0 else 9.0 for unit in backward.of("late")]
    planned = ScheduleOverlap(overlaps=(Overlap(reduce=tuple(delays)),))
    for item in (ScheduleOverlap(), planned):
        order = [node.name for node in run_passes(before, [item]).calls()]
        sums = [order.index(unit.start.name) for unit in chains if unit.start is not None]
        products = [order.index(name) for name in ("mm_3", "mm_4")]
        assert sums[0] < products[1] < sums[1] < sums[2]  # of the second layer, made first


def test_says_why_it_declined() -> None:
    graph = two_layers().capture(0).captured_graph
    assert ScheduleOverlap()(graph).reason == "there is no collective"
