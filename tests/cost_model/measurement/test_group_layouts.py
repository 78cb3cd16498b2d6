"""Which groups are measured."""

import math

import pytest

from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement.group_layouts import (
    MAX_GROUPS,
    Axis,
    affordable,
    axes_of,
    block_of,
    every_axis,
    layouts,
    measured_axes,
)


def test_groups_of_an_axis_are_those_of_a_mesh():
    mesh = {"dp": 2, "tp": 3, "pp": 2}
    assert axes_of(mesh) == [Axis(2, 6), Axis(3, 2), Axis(2, 1)]
    assert Axis(3, 2).groups(12) == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert axes_of({"dp": 4, "tp": 1}) == [Axis(4, 1)]


@pytest.mark.parametrize("world", [2, 3, 8, 12])
def test_every_axis_covers_the_world_once(world):
    for axis in every_axis(world):
        groups = axis.groups(world)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(world))
        assert {len(ranks) for ranks in groups} == {axis.ranks}


def test_two_nodes_of_two_have_groups_inside_across_and_over_all_alone_and_together():
    shapes = layouts(every_axis(4), 4, 2, alone=True)
    assert shapes == {
        GroupShape(2, 1, 1): ((((0, 2)),),),
        GroupShape(2, 1, 2): (((0, 2), (1, 3)),),
        GroupShape(2, 2, 1): (((0, 1),),),
        GroupShape(2, 2, 2): (((0, 1), (2, 3)),),
        GroupShape(4, 2, 1): (((0, 1, 2, 3),),),
    }


def test_on_one_node_contiguous_and_strided_groups_are_two_ways_of_one_shape():
    shapes = layouts(every_axis(4), 4, 4)
    assert shapes[GroupShape(2, 2, 2)] == (((0, 1), (2, 3)), ((0, 2), (1, 3)))


def test_three_ranks_have_pairs_for_messages():
    shapes = layouts(every_axis(3), 3, 3, alone=True)
    assert shapes == {GroupShape(2, 2): (((0, 1),),), GroupShape(3, 3): (((0, 1, 2),),)}


@pytest.mark.parametrize("world", [2, 8, 16, 64, 1024])
@pytest.mark.parametrize("per_node", [1, 8, 1024])
def test_no_shape_needs_more_than_a_dozen_groups_and_the_world_is_one(world, per_node):
    per_node = min(world, per_node)
    axes = measured_axes(world, per_node)
    shapes = affordable(layouts(axes, world, per_node, alone=True))
    for shape, several in shapes.items():
        assert len({ranks for groups in several for ranks in groups}) <= MAX_GROUPS
        assert {len(groups) for groups in several} == {shape.groups}
    assert GroupShape(world, per_node) in shapes
    assert world <= 8 or per_node in (1, world) or GroupShape(per_node, per_node) in shapes


def test_a_thousand_ranks_are_measured_inside_nodes_across_them_and_over_all():
    shapes = affordable(layouts(measured_axes(1024, 8), 1024, 8, alone=True))
    assert list(shapes) == [
        GroupShape(2, 1),
        GroupShape(2, 2),
        GroupShape(4, 4),
        GroupShape(8, 8),
        GroupShape(128, 1),
        GroupShape(128, 1, groups=8),
        GroupShape(1024, 8),
    ]


@pytest.mark.parametrize(
    ("hosts", "block"),
    [("aaaa", 4), ("aabb", 2), ("abab", 1), ("aaab", 1), ("aab", 1), ("a", 1), ("aabbaa", 2)],
)
def test_ranks_per_node_are_true_of_every_run_of_ranks(hosts, block):
    assert block_of(list(hosts)) == block
    assert math.gcd(block, len(hosts)) == block
