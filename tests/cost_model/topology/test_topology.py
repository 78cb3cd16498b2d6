"""The topology of a cluster as a graph."""

import networkx as nx
import pytest

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.topology.topology import group_devices, repeated, topology_from_pairs
from tests.cost_model.machines import every_machine, machines


def dgx_a100(nodes: int) -> nx.Graph:
    return machines(nodes, 8, 300e9, 8, 25e9)


def test_a_group_takes_consecutive_devices_of_each_machine():
    graph = machines(2, 4, 10e9, 2, 1e9, hub="")
    devices = group_devices(graph, GroupShape(4, 2, 2))
    assert devices == ["node0/gpu0", "node0/gpu1", "node1/gpu0", "node1/gpu1"]
    with pytest.raises(ClusterError, match="room for 4 such groups"):
        group_devices(graph, GroupShape(2, 1, 5))


def test_repeating_a_machine_and_refusing_unlike_ones():
    graph = dgx_a100(2)
    larger = repeated(graph, 4)
    assert nx.is_isomorphic(every_machine(larger), dgx_a100(4))
    assert every_machine(repeated(larger, 2)).edges == graph.edges
    assert group_devices(larger, GroupShape(16, 8, 2)) == group_devices(graph, GroupShape(8, 8, 2))
    with pytest.raises(ClusterError, match=r"4 machines .* has room for 2 such groups"):
        group_devices(larger, GroupShape(16, 8, 3))
    graph.edges["node1/nic3", "fabric"]["bytes_per_s"] = 1e9
    with pytest.raises(ClusterError, match="machines of this cluster differ"):
        repeated(graph, 3)
    with pytest.raises(ClusterError, match="no NIC"):
        repeated(machines(1, 8, 10e9, hub=""), 2)


def sends(shape: GroupShape, latency_s: float, bytes_per_s: float) -> dict[CurveKey, Measured]:
    sizes = (1, 10**4, 10**6, 10**7)
    curve = Curve(sizes, tuple(latency_s + n / bytes_per_s for n in sizes))
    return {CurveKey("send", shape): Measured(curve, "measured today", "gloo")}


def latency_s(graph: nx.Graph, source: str, target: str) -> float:
    return nx.shortest_path_length(graph, source, target, weight="latency_s")


NEAR = sends(GroupShape(2, 2), 1e-4, 1e9)
FAR = sends(GroupShape(2, 1), 3e-4, 1e8)


def test_ranks_of_two_nodes_share_a_nic():
    graph = topology_from_pairs({**NEAR, **FAR}, 2, 2)
    inside, outside = graph.edges["node0", "node0/rank0"], graph.edges["node0/nic0", "fabric"]
    assert inside["bytes_per_s"] == pytest.approx(1e9, rel=0.05)
    assert outside["bytes_per_s"] == pytest.approx(1e8, rel=0.05)
    assert latency_s(graph, "node0/rank0", "node0/rank1") == pytest.approx(1e-4, rel=0.01)
    whole = every_machine(graph)
    assert latency_s(whole, "node0/rank0", "node1/rank0") == pytest.approx(3e-4, rel=0.01)
    assert outside["provenance"] == "measured today"


def test_a_topology_needs_its_pairs():
    assert topology_from_pairs({}, 1, 2) is None
    assert topology_from_pairs(NEAR, 2, 2) is None
    assert topology_from_pairs(FAR, 2, 2) is None
    one_each = every_machine(topology_from_pairs(FAR, 2, 1))
    assert latency_s(one_each, "node0/rank0", "node1/rank0") == pytest.approx(3e-4, rel=0.01)
    one_node = topology_from_pairs(NEAR, 1, 4)
    assert latency_s(one_node, "node0/rank0", "node0/rank3") == pytest.approx(1e-4, rel=0.01)
