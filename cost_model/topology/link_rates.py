"""`link_of_group`: round figures of a group of devices, from the links that it spans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.cost_model.collectives import Link
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.topology.topology import group_devices, node_of

if TYPE_CHECKING:
    import networkx as nx

LAUNCH_S = 1.5e-5
"""Seconds to launch a collective on a GPU, as for clusters without any measurement."""


def link_of_group(graph: nx.Graph, shape: GroupShape, nic_share: float) -> Link | None:
    """Link of the slowest rank of a ring over the first group of a shape; None if unknown.

    Devices with links to each other use all of these at once. Others use their links to a switch
    or host. Between nodes a ring has `nic_share` of the NICs of a node.
    """
    try:
        devices = group_devices(graph, shape)
    except ClusterError:
        return None
    rates, latencies = [], []
    if shape.ranks_per_node > 1:
        first = [d for d in devices if node_of(d) == node_of(devices[0])]
        near = [_own_links(graph, device, first) for device in first]
        rates += [rate for rate, _ in near]
        latencies += [latency for _, latency in near]
    if shape.nodes > 1:
        nics = [
            edge for name, other, edge in graph.edges(data=True)
            if "fabric" in (name, other) and node_of(devices[0]) in (node_of(name), node_of(other))
        ]  # fmt: skip
        if not nics:
            return None
        rates.append(nic_share * sum(edge["bytes_per_s"] for edge in nics))
        latencies += [2 * edge["latency_s"] for edge in nics]
    if not rates or min(rates) <= 0:
        return None
    return Link(LAUNCH_S, max(latencies), min(rates))


def _own_links(graph: nx.Graph, device: str, group: list[str]) -> tuple[float, float]:
    """Bytes per second and latency of a device to others of its group on its node."""
    direct = [graph.edges[device, other] for other in graph[device] if other in group]
    shared = [
        graph.edges[device, other] for other in graph[device]
        if graph.nodes[other]["kind"] in ("switch", "host")
    ]  # fmt: skip
    links = direct or sorted(shared, key=lambda edge: -edge["bytes_per_s"])[:1]
    latency = max((edge["latency_s"] for edge in links), default=0.0)
    return sum(edge["bytes_per_s"] for edge in links), latency * (1 if direct else 2)
