"""The topology of a cluster as a graph."""

import networkx as nx
import pytest

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.topology.topology import (
    Wire,
    build,
    check_topology,
    group_devices,
    hosted,
    repeated,
    switched,
)

WIRE = Wire(10e9, 1e-6, "modelled by the test")
NIC = Wire(1e9, 2e-6, "modelled by the test's NIC")


def dgx_a100(nodes: int) -> nx.Graph:
    nvswitch = Wire(300e9, 1e-6, "modelled by NVLink 3")
    return build(nodes, 8, switched(nvswitch), 8, Wire(25e9, 1e-6, "modelled by HDR"))


def test_a_group_takes_consecutive_devices_of_each_machine():
    graph = build(2, 4, hosted(WIRE), 2, NIC)
    devices = group_devices(graph, GroupShape(4, 2, 2))
    assert devices == ["node0/gpu0", "node0/gpu1", "node1/gpu0", "node1/gpu1"]
    with pytest.raises(ClusterError, match="room for 4 such groups"):
        group_devices(graph, GroupShape(2, 1, 5))


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
