"""What leaves a node, by hand; `tests/benchmarks/test_wire.py` counts it."""

import pytest

from autopar.cost_model.algorithms.wire_bytes import leaving
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape


@pytest.mark.parametrize(
    ("collective", "shape", "multiple"),
    [
        ("all_reduce", GroupShape(4, 1), 1.5),
        ("all_reduce", GroupShape(4, 2), 1.5),  # one ring, one link out of each node
        ("all_reduce", GroupShape(4, 4), 0.0),
        ("all_reduce", GroupShape(2, 1, groups=2), 2.0),  # the two ranks of a node each have one
        ("all_gather", GroupShape(4, 2), 0.75),
        ("reduce_scatter", GroupShape(4, 2), 1.5),
        ("all_to_all", GroupShape(4, 1), 0.75),
        ("all_to_all", GroupShape(4, 2), 1.0),  # two ranks, each to two others
        ("broadcast", GroupShape(4, 1), 2.0),
        ("broadcast", GroupShape(8, 4), 4.0),  # the four ranks beside the root reach the others
    ],
)
def test_what_leaves_a_node(collective: str, shape: GroupShape, multiple: float) -> None:
    per_node = shape.ranks_per_node * shape.groups
    assert leaving(collective, shape, "gloo", per_node) == multiple


def test_nccl_scatters_sums_in_one_round() -> None:
    assert leaving("reduce_scatter", GroupShape(4, 2), "nccl", 2) == 0.75


def test_groups_that_do_not_fill_a_node_are_refused() -> None:
    with pytest.raises(ClusterError, match="do not fill nodes of 3 ranks"):
        leaving("all_reduce", GroupShape(4, 2), "gloo", 3)
