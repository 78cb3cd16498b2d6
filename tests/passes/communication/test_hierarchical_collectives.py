"""Collectives by level: their text, what they compute, and when they stay as they are."""

from dataclasses import replace

import pytest
from expecttest import assert_expected_inline

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.mesh_levels import Levels
from autopar.core.ir.messages import collective_of
from autopar.core.plan.layout import Layout
from autopar.passes.communication.bucket_collectives import BucketCollectives
from autopar.passes.communication.hierarchical_collectives import PARTS, HierarchicalCollectives
from autopar.passes.core.collective_ops import starts
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from tests.passes.golden import changes, two_layers
from tests.passes.parity import AXIS, World, assert_parity


def levels(within: int, least: int = 0) -> Levels:
    return Levels(AXIS, within, tuple((kind, least) for kind in PARTS))


def graphs_of(it: World, zero: int, own: Levels, backend: str) -> list[TrainingGraph]:
    plan = it.plan(zero, levels=(own,))
    graphs = [replace(it.graph(rank), axes=Layout(plan).axes) for rank in range(it.ranks)]
    return [
        run_passes(g, build_pass_pipeline(plan, rank, backend)) for rank, g in enumerate(graphs)
    ]


@pytest.mark.parametrize(("ranks", "within"), [(4, 2), (6, 3)])
@pytest.mark.parametrize(("zero", "backend"), [(0, "nccl"), (1, "gloo"), (2, "nccl"), (3, "gloo")])
def test_results_are_those_of_one_device(ranks: int, within: int, zero: int, backend: str) -> None:
    """Chunks are uneven, and some are empty."""
    it = two_layers(ranks=ranks, rows=7, bias=True, width=9)
    graphs = graphs_of(it, zero, levels(within), backend)
    sent = [n.args[-1] for n in graphs[0].calls() if collective_of(n) is not None]
    assert set(sent) == {"dp.inter_node", "dp.intra_node"}
    assert_parity(it, graphs)


def bucketed(ranks: int, own: Levels) -> TrainingGraph:
    it = two_layers(ranks=ranks, rows=ranks)
    plan = it.plan(0, levels=(own,))
    passes = build_pass_pipeline(plan, 0, "gloo")
    end = next(i for i, p in enumerate(passes) if isinstance(p, BucketCollectives)) + 1
    return run_passes(replace(it.graph(0), axes=Layout(plan).axes), passes[:end])


def test_all_reduce() -> None:
    """18 numbers are padded to be cut in four; what is smaller stays as it is."""
    before = bucketed(8, own := levels(4, least=100))
    after = run_passes(before, [HierarchicalCollectives(own)])
    assert_expected_inline(
        changes(before, after),
        """\
+ view_default: [6] P(sum) = view(t_5, [-1])
+ view_default_1: [12] P(sum) = view(t_8, [-1])
+ new_zeros_default: [2] P(sum) = new_zeros(view_default, [2])
+ cat_default: [20] P(sum) = cat([view_default, view_default_1, new_zeros_default])
+ start_reduce_scatter: [5] P(sum) = start_reduce_scatter([cat_default], [5], dp.intra_node)
+ wait_4: [5] P(sum) = wait(start_reduce_scatter)
+ getitem_5: [5] P(sum) = getitem(wait_4, 0)
+ start_all_reduce_4: [5] S(0) = start_all_reduce([getitem_5], dp.inter_node)
+ wait_5: [5] S(0) = wait(start_all_reduce_4)
+ getitem_6: [5] S(0) = getitem(wait_5, 0)
+ start_all_gather: [20] R = start_all_gather([getitem_6], [20], dp.intra_node)
+ wait_6: [20] R = wait(start_all_gather)
+ getitem_7: [20] R = getitem(wait_6, 0)
+ split_with_sizes_default: [6] [12] [2] R = split_with_sizes(getitem_7, [6, 12, 2])
+ getitem_8: [6] R = getitem(split_with_sizes_default, 0)
+ view_default_2: [2,3] R = view(getitem_8, [2, 3])
+ getitem_9: [12] R = getitem(split_with_sizes_default, 1)
+ view_default_3: [3,4] R = view(getitem_9, [3, 4])
- start_all_reduce_3: [2,3] [3,4] R = start_all_reduce([t_5, t_8], dp)
- wait_3: [2,3] [3,4] R = wait(start_all_reduce_3)
- getitem_3: [2,3] R = getitem(wait_3, 0)
- getitem_4: [3,4] R = getitem(wait_3, 1)
-> gradient blocks.0.weight = view_default_3
-> gradient blocks.1.weight = view_default_2""",
    )


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (levels(4), "dp has no two levels: 4 ranks, 4 a node"),
        (levels(1), "dp has no two levels: 4 ranks, 1 a node"),
        (levels(3), "dp has no two levels: 4 ranks, 3 a node"),
        (levels(2, least=1 << 20), "no message over dp is large enough"),
    ],
)
def test_says_why_it_declined(own: Levels, reason: str) -> None:
    graph = bucketed(4, own)
    result = HierarchicalCollectives(own)(graph)
    assert result.reason == reason
    assert len(list(starts(result.graph))) == len(list(starts(graph)))
