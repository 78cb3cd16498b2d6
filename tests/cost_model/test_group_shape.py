"""Shapes of groups along the axes of a mesh."""

import math
import random
from collections import Counter

import pytest

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape


@pytest.mark.parametrize(
    ("mesh", "axis", "ranks_per_node", "shape"),
    [
        ({"dp": 8}, "dp", 8, GroupShape(8, 8)),
        ({"dp": 16}, "dp", 8, GroupShape(16, 8)),
        ({"dp": 2, "tp": 8}, "tp", 8, GroupShape(8, 8, 2)),
        ({"dp": 2, "tp": 8}, "dp", 8, GroupShape(2, 1, 8)),  # every NIC is shared by none
        ({"dp": 4, "tp": 4}, "dp", 8, GroupShape(4, 2, 4)),
        ({"pp": 2, "dp": 2, "tp": 2}, "dp", 8, GroupShape(2, 2, 4)),
        ({"dp": 3}, "dp", 2, GroupShape(3, 1)),  # 2 + 1
    ],
)
def test_axes_of_a_mesh(mesh, axis, ranks_per_node, shape):
    assert GroupShape.of_axis(mesh, axis, ranks_per_node) == shape


def test_parts_of_groups_on_nodes_recur():
    draw = random.Random(0)
    for _ in range(500):
        ranks, stride, node = draw.randint(1, 60), draw.randint(1, 12), draw.randint(1, 12)
        on_node = Counter(rank * stride // node for rank in range(ranks))
        shape = GroupShape.of_axis({"dp": ranks, "tp": stride}, "dp", node)
        assert shape == GroupShape(ranks, math.gcd(*on_node.values()), stride)
    assert shape.nodes * shape.ranks_per_node == shape.ranks


def test_text_and_nonsense():
    assert str(GroupShape(8, 4, 2)) == "8 ranks, 4 a node, 2 at once"
    with pytest.raises(ClusterError, match="evenly"):
        GroupShape(6, 4)
    with pytest.raises(ClusterError, match="positive"):
        GroupShape(2, 2, 0)


def test_levels_of_an_axis():
    """They are groups of the mesh in which the axis is two, and no other axis sees them."""
    axes = {"dp": 4, "tp": 2, "dp.inter_node": 2, "dp.intra_node": 2}
    assert GroupShape.of_axis(axes, "dp.intra_node", 4) == GroupShape(2, 2, 4)
    assert GroupShape.of_axis(axes, "dp.inter_node", 4) == GroupShape(2, 1, 4)
    assert GroupShape.of_axis(axes, "dp", 4) == GroupShape(4, 2, 2)
    assert GroupShape.of_axis(axes, "tp", 4) == GroupShape(2, 2, 4)
