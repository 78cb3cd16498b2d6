"""Groups that were not measured: worlds made of a known law are predicted, unknown ones refused."""

import math
from dataclasses import replace

import pytest

from autopar.cost_model.algorithms.extrapolate import Fabric, derive, effective_cores
from autopar.cost_model.collectives import ring
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape

SIZES = tuple(4**power for power in range(5, 14))
GLOO = Fabric("gloo", ranks_per_node=4, nics=4, trees=False)
NCCL = Fabric("nccl", ranks_per_node=8, nics=8, trees=False)


def law(collective, shape, nbytes, *, cores=100, backend="gloo"):
    """A ring of 50 us a step and 1 GB/s, slower where more ranks are busy than there are cores."""
    steps, share = ring(collective, shape.ranks, backend)
    if backend == "gloo":
        share = GLOO.link_bytes(collective, shape)
    busy = shape.ranks_per_node * shape.groups
    return (steps * 50e-6 + share * nbytes / 1e9) * max(1, busy / cores)


def known(collective, *shapes, **options):
    return {
        CurveKey(collective, shape): Measured(
            Curve(SIZES, tuple(law(collective, shape, size, **options) for size in SIZES)),
            "measured now",
            "gloo",
        )
        for shape in shapes
    }


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all", "broadcast"])
@pytest.mark.parametrize(
    ("measured", "wanted"),
    [(GroupShape(4, 4), GroupShape(8, 8)), (GroupShape(2, 1), GroupShape(4, 1))],
)
def test_a_ring_of_twice_the_ranks(collective, measured, wanted):
    curves = known(collective, measured)
    for nbytes in (1000, 10**5, 10**7, 10**9):
        cost = derive(curves, CurveKey(collective, wanted), nbytes, GLOO)
        expected = law(collective, wanted, nbytes)
        assert cost.seconds == pytest.approx(expected, rel=0.05)
        assert cost.kind == "modelled"
        assert "from" in cost.provenance
        assert 0.05 < cost.error < 0.5


@pytest.mark.parametrize("cores", [2, 3, 100])
def test_what_sharing_cores_costs_is_learnt_from_groups_side_by_side(cores):
    shapes = GroupShape(2, 2), GroupShape(2, 2, 2), GroupShape(4, 4)
    curves = known("all_reduce", *shapes, cores=cores)
    found = effective_cores(curves, 4)
    assert found == pytest.approx(cores if cores < 4 else math.inf)
    wanted = GroupShape(8, 8)
    fabric = replace(GLOO, cores=found)
    cost = derive(curves, CurveKey("all_reduce", wanted), 10**6, fabric)
    assert cost.seconds == pytest.approx(law("all_reduce", wanted, 10**6, cores=cores), rel=0.05)


def test_nodes_are_not_told_from_one_node_nor_the_reverse():
    one, two = known("all_reduce", GroupShape(8, 8)), known("all_reduce", GroupShape(16, 8))
    assert derive(one, CurveKey("all_reduce", GroupShape(16, 8)), 1000, NCCL) is None
    assert derive(two, CurveKey("all_reduce", GroupShape(8, 8)), 1000, NCCL) is None
    assert derive(two, CurveKey("all_gather", GroupShape(16, 8)), 1000, NCCL) is None


def test_groups_of_one_rank_a_node_get_one_nic_each():
    whole, thin = GroupShape(16, 8), GroupShape(2, 1, 8)
    curves = known("all_reduce", whole, backend="nccl")
    large = 10**9
    cost = derive(curves, CurveKey("all_reduce", thin), large, NCCL)
    # a rank sends 1 byte a byte through an eighth of the NICs, the whole group 15/8 through all
    assert cost.seconds == pytest.approx(large * (15 / 8) * (8 / (15 / 8)) / 1e9, rel=0.05)
    two_nics = Fabric("nccl", ranks_per_node=8, nics=2, trees=False)
    alone = derive(curves, CurveKey("all_reduce", GroupShape(2, 1)), large, two_nics)
    assert alone.seconds == pytest.approx(cost.seconds / 4, rel=0.05)


def test_trees_send_less_between_two_nodes():
    trees = Fabric("nccl", ranks_per_node=8, nics=8, trees=True)
    assert trees.link_bytes("all_reduce", GroupShape(16, 8)) == 1
    assert trees.link_bytes("all_reduce", GroupShape(32, 8)) == 1.5
    assert NCCL.link_bytes("all_reduce", GroupShape(16, 8)) == 15 / 8
    assert NCCL.link_bytes("all_gather", GroupShape(8, 8)) == 7 / 8


def test_gloo_is_not_a_ring_throughout():
    def bytes_of(collective, ranks):
        return GLOO.link_bytes(collective, GroupShape(ranks, ranks))

    assert [bytes_of("broadcast", n) for n in (2, 3, 4, 8)] == [1, 2, 3, 6]
    assert [bytes_of("all_to_all", n) for n in (2, 4)] == [0.75, 0.75]
    assert [bytes_of("all_gather", n) for n in (2, 4)] == [0.625, 0.75]
    assert bytes_of("reduce_scatter", 4) == bytes_of("all_reduce", 4) == 1.5


def test_of_several_the_nearest_serves():
    curves = known("all_reduce", GroupShape(2, 2), GroupShape(4, 4), GroupShape(4, 2))
    cost = derive(curves, CurveKey("all_reduce", GroupShape(8, 8)), 1000, GLOO)
    assert "from 4 ranks, 4 a node" in cost.provenance
    with pytest.raises(ClusterError):
        derive(curves, CurveKey("all_reduce", GroupShape(8, 8)), -1, GLOO)
