"""The graph of a cluster, rings and trees on it, and what groups share."""

from collections import Counter

import networkx as nx
import pytest

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.topology.link_levels import levels
from autopar.cost_model.topology.rings_and_trees import Routes, double_tree, tree
from autopar.cost_model.topology.topology import (
    Wire,
    build,
    check_topology,
    devices_of,
    hosted,
    meshed,
    repeated,
    switched,
)

WIRE = Wire(10e9, 1e-6, "modelled by the test")
NIC = Wire(1e9, 2e-6, "modelled by the test's NIC")


NVLINK = Wire(25e9, 1e-6, "modelled by NVLink 2")
CUBE_MESH = {
    **dict.fromkeys([(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], 1),
    **dict.fromkeys([(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)], 2),
}


def dgx_a100(nodes: int) -> nx.Graph:
    nvswitch = Wire(300e9, 1e-6, "modelled by NVLink 3")
    return build(nodes, 8, switched(nvswitch), 8, Wire(25e9, 1e-6, "modelled by HDR"))


def test_the_ring_of_a_dgx_1_uses_its_double_links():
    graph = build(1, 8, meshed(CUBE_MESH, NVLINK))
    first = Routes(graph).ring(devices_of(graph))
    assert first.exact
    assert first.bytes_per_s == 50e9  # two NVLinks at every hop; the order of numbers has none
    found = Routes(graph).rings(devices_of(graph))
    assert [ring.bytes_per_s for ring in found] == [50e9, 50e9, 25e9, 25e9]
    used = Counter(hop for ring in found for hop in ring.hops)
    assert max(used.values()) == 1  # both directions of every link, none twice


def test_a_search_finds_as_good_a_ring_as_trying_all_orders():
    """A mesh of 6 where the order of numbers is poor; the search is what 9 and more devices get."""
    slow, fast = 1, 8
    widths = {(i, j): slow for i in range(6) for j in range(i)}
    widths |= dict.fromkeys([(3, 0), (3, 1), (4, 1), (4, 2), (5, 2), (5, 0)], fast)
    graph = build(1, 6, meshed(widths, WIRE))
    routes, devices = Routes(graph), devices_of(graph)
    exact = routes.ring(devices)
    assert exact.bytes_per_s == fast * WIRE.bytes_per_s
    searched = routes._as_ring(routes._improved(tuple(devices)), exact=False)
    assert searched.bytes_per_s == exact.bytes_per_s


def test_rings_over_two_machines_take_all_nics():
    graph = dgx_a100(2)
    found = Routes(graph).rings(devices_of(graph))
    assert len(found) == 8
    assert sum(ring.bytes_per_s for ring in found) == pytest.approx(8 * 25e9)
    assert all(ring.exact for ring in found)  # a NIC is the limit whatever the order
    assert "nic" in "".join(found[0].bottleneck)


def test_a_device_with_several_nics_uses_them_all():
    graph = build(2, 2, hosted(WIRE), 4, NIC)
    found = levels(graph, GroupShape(2, 1))
    assert found.node_bytes_per_s == pytest.approx(2e9)


def test_groups_at_once_share_nics():
    """Four GPUs and two NICs a machine: one a node has a NIC alone, four have half of one each."""
    graph = build(2, 4, hosted(WIRE), 2, NIC)
    alone = levels(graph, GroupShape(2, 1, 1))
    all_at_once = levels(graph, GroupShape(2, 1, 4))
    whole = levels(graph, GroupShape(8, 4, 1))
    assert alone.node_bytes_per_s == pytest.approx(1e9)
    assert all_at_once.node_bytes_per_s == pytest.approx(0.5e9)
    assert whole.node_bytes_per_s == pytest.approx(2e9)
    assert "nic" in whole.bottleneck
    assert whole.provenance == NIC.provenance
    assert whole.node_latency_s == pytest.approx(4 * NIC.latency_s)
    inside = levels(graph, GroupShape(4, 4, 2))
    assert inside.bytes_per_s == pytest.approx(10e9)
    with pytest.raises(ClusterError, match="room for 4 such groups"):
        levels(graph, GroupShape(2, 1, 5))


@pytest.mark.parametrize("count", [2, 3, 7, 8, 12, 13])
def test_in_a_double_tree_nobody_is_inside_both(count):
    """Sanders et al.: all ranks reach the root, in logarithmic depth, inside one tree at most."""
    inner = []
    for parents in double_tree(count):
        (root,) = set(range(count)) - set(parents)
        depth = 0
        for rank in range(count):
            steps = 0
            while rank != root:
                rank, steps = parents[rank], steps + 1
            depth = max(depth, steps)
        assert depth <= count.bit_length()
        assert max(Counter(parents.values()).values()) <= 2
        inner.append(set(parents.values()))
    assert len(inner[0] & inner[1]) <= count % 2


def test_trees_on_two_machines_enter_by_two_nics():
    graph = dgx_a100(2)
    found = tree(graph, devices_of(graph))
    crossing = [(c, p) for tree in found.parents for c, p in tree.items() if c[:5] != p[:5]]
    assert len({name for pair in crossing for name in pair}) == 4
    assert found.bytes_per_s == pytest.approx(50e9)  # half of a message over each of two NICs


def test_repeating_a_machine_and_refusing_unlike_ones():
    graph = dgx_a100(2)
    larger = repeated(graph, 4)
    assert nx.is_isomorphic(larger, dgx_a100(4))
    assert repeated(larger, 2).edges == graph.edges
    graph.edges["node1/nic3", "fabric"]["bytes_per_s"] = 1e9
    with pytest.raises(ClusterError, match="machines of this cluster differ"):
        repeated(graph, 3)
    with pytest.raises(ClusterError, match="no NIC"):
        repeated(build(1, 8, hosted(WIRE)), 2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda g: g.nodes["node0/gpu1"].update(kind="gpu"), "'node0/gpu1' is of kind 'gpu'"),
        (lambda g: g.edges["node0", "node0/gpu1"].pop("latency_s"), "lacks latency_s"),
        (lambda g: g.edges["node0", "node0/gpu1"].update(bytes_per_s=-1), "has -1 bytes/s"),
        (lambda g: g.edges["node0", "node0/gpu1"].update(provenance="guess"), "provenance 'guess'"),
    ],
)
def test_a_damaged_graph_is_refused(damage, message):
    graph = build(1, 2, hosted(WIRE))
    damage(graph)
    with pytest.raises(ClusterError, match=message):
        check_topology(graph)


def test_devices_that_nothing_links_are_named():
    graph = build(1, 3, meshed({(0, 1): 1}, WIRE))
    with pytest.raises(ClusterError, match="nothing links node0/gpu"):
        Routes(graph).ring(devices_of(graph))
