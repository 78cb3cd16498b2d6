"""The topology of measured CPUs."""

import networkx as nx
import pytest

from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.topology.from_pairs import topology_from_pairs


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
    assert latency_s(graph, "node0/rank0", "node1/rank0") == pytest.approx(3e-4, rel=0.01)
    assert outside["provenance"] == "measured today"


def test_a_topology_needs_its_pairs():
    assert topology_from_pairs({}, 1, 2) is None
    assert topology_from_pairs(NEAR, 2, 2) is None
    assert topology_from_pairs(FAR, 2, 2) is None
    one_each = topology_from_pairs(FAR, 2, 1)
    assert latency_s(one_each, "node0/rank0", "node1/rank0") == pytest.approx(3e-4, rel=0.01)
    one_node = topology_from_pairs(NEAR, 1, 4)
    assert latency_s(one_node, "node0/rank0", "node0/rank3") == pytest.approx(1e-4, rel=0.01)
