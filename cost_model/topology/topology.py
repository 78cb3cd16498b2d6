"""The topology of a cluster as a networkx graph.

Graph nodes are named "node0", "node0/gpu3", "node0/switch", "node0/nic1" and "fabric"; their
`kind` is "host", "device", "switch", "nic" or "fabric". Edges are full-duplex links with
`bytes_per_s` (one direction), `latency_s` and `provenance`. A NIC serves the devices that it has a
link to.

A graph describes every machine, or the first of alike ones: `graph.graph["machines"]` is then
their number. So a large cluster costs what one machine does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape

if TYPE_CHECKING:
    import networkx as nx

_NEAR_HOPS = 2  # a rank, its host, another rank
_FAR_HOPS = 4  # additional: host, NIC, fabric, NIC, host

MACHINES = "machines"
"""Attribute of a graph that describes one of several alike machines: their number."""


def topology_from_pairs(
    curves: Mapping[CurveKey, Measured], nodes: int, ranks_per_node: int
) -> nx.Graph | None:
    """Ranks at their host, and hosts with one NIC each at a fabric; the hosts are alike.

    Rates and latencies are those of a "send" between a pair on one node, and a pair on two. Links
    of GPUs cannot be derived from these, so this is for ranks on CPUs. None if a pair was not
    measured.
    """
    messages = {key.shape: entry for key, entry in curves.items() if key.collective == "send"}
    near, far = messages.get(GroupShape(2, 2)), messages.get(GroupShape(2, 1))
    if (ranks_per_node > 1 and near is None) or (nodes > 1 and far is None):
        return None
    within = near or far
    if within is None:
        return None
    latency = near.curve.seconds[0] if near else 0.0
    inside = _link(within, latency / _NEAR_HOPS)
    import networkx as nx

    graph = nx.Graph()
    graph.add_node("node0", kind="host", cpu="intel")
    ranks = [f"node0/rank{i}" for i in range(ranks_per_node)]
    graph.add_nodes_from(ranks, kind="device")
    graph.add_edges_from([(rank, "node0") for rank in ranks], **inside)
    if far is not None and nodes > 1:
        beyond = _link(far, max(0.0, far.curve.seconds[0] - latency) / _FAR_HOPS)
        graph.add_node("fabric", kind="fabric")
        graph.add_node("node0/nic0", kind="nic")
        graph.add_edge("node0/nic0", "fabric", **beyond)
        graph.add_edge("node0", "node0/nic0", **beyond)
    return repeated(graph, nodes)


def _link(pair: Measured, latency_s: float) -> dict[str, Any]:
    """A link at the rate of the pair's largest messages, latency apart."""
    curve = pair.curve
    whole = curve.seconds[-1] - min(curve.pieces[-1].latency_s, curve.seconds[-1] / 2)
    rate = curve.bytes[-1] / whole
    return {"bytes_per_s": rate, "latency_s": latency_s, "provenance": pair.provenance}


def node_of(name: str) -> str:
    """The machine of a graph node: "node0/gpu3" -> "node0"."""
    return name.partition("/")[0]


def devices_by_node(graph: nx.Graph) -> dict[str, list[str]]:
    """Devices of each machine that a graph describes, in the order of ranks."""
    devices: dict[str, list[str]] = {}
    for name, kind in graph.nodes(data="kind"):
        if kind == "device":
            devices.setdefault(node_of(name), []).append(name)
    return devices


def machine_count(graph: nx.Graph) -> int:
    """Machines of the cluster, described or alike."""
    count: int = graph.graph.get(MACHINES) or len(devices_by_node(graph))
    return count


def group_devices(graph: nx.Graph, shape: GroupShape) -> list[str]:
    """The devices of the first group of a shape: consecutive ones of each described machine.

    Raises:
        ClusterError: the groups do not fit on the cluster.
    """
    machines, count = list(devices_by_node(graph).values()), machine_count(graph)
    devices = min(map(len, machines))
    fitting = (devices // shape.ranks_per_node) * (count // shape.nodes)
    if shape.groups > fitting:
        raise ClusterError(
            f"{shape}: this cluster of {count} machines with {devices} devices has room "
            f"for {fitting} such groups"
        )
    return [d for machine in machines[: shape.nodes] for d in machine[: shape.ranks_per_node]]


def repeated(graph: nx.Graph, nodes: int) -> nx.Graph:
    """The topology with another number of machines, as the first of them and their number.

    Raises:
        ClusterError: the machines differ, or the only one has no NIC.
    """
    if nodes == machine_count(graph):
        return graph
    machines = list(devices_by_node(graph))
    names: dict[str, set[str]] = {}
    for name in graph:
        names.setdefault(node_of(name), {"fabric"}).add(name)
    first, *others = (graph.subgraph(names[machine]) for machine in machines)
    if not all(_alike(first, other) for other in others):
        raise ClusterError(
            f"the {len(machines)} machines of this cluster differ: what {nodes} of them would do "
            f"must be measured"
        )
    if nodes > 1 and "fabric" not in graph:
        raise ClusterError(f"this machine has no NIC: nothing is known of {nodes} of them")
    import networkx as nx

    moved = {name: "node0" + name.removeprefix(machines[0]) for name in first if name != "fabric"}
    described = nx.relabel_nodes(first, moved)
    described.graph[MACHINES] = nodes
    return described


def topology_document(graph: nx.Graph) -> dict[str, Any]:
    """The JSON form of a topology; `machines` where it describes one of several."""
    import networkx as nx

    data: dict[str, Any] = nx.node_link_data(graph, edges="edges")
    attributes = dict(data["graph"])
    machines = attributes.pop(MACHINES, None)
    return data | {"graph": attributes} | ({MACHINES: machines} if machines else {})


def topology_of(document: Mapping[str, Any]) -> nx.Graph:
    """The topology that `topology_document` wrote."""
    import networkx as nx

    graph = nx.node_link_graph(dict(document), edges="edges")
    if machines := document.get(MACHINES):
        graph.graph[MACHINES] = machines
    return graph


def _alike(first: nx.Graph, second: nx.Graph) -> bool:
    import networkx as nx

    widths = [sorted(w for *_, w in g.edges(data="bytes_per_s")) for g in (first, second)]
    return widths[0] == widths[1] and nx.vf2pp_is_isomorphic(first, second, node_label="kind")


def nics_per_node(graph: nx.Graph) -> int:
    """NICs of the first machine."""
    first, kinds = next(iter(devices_by_node(graph)), ""), graph.nodes(data="kind")
    return sum(kind == "nic" and node_of(name) == first for name, kind in kinds)
