"""`Levels`: what a group of ranks gets of a cluster's links, inside a machine and between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import networkx as nx

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.topology.rings_and_trees import Link, Routes
from autopar.cost_model.topology.topology import by_node, devices_of, node_of


@dataclass(frozen=True)
class Levels:
    """The two levels that the formulas of collectives speak of.

    Attributes:
        latency_s: seconds of an empty message between two ranks of one machine.
        bytes_per_s: bytes per second that one rank sends inside its machine.
        node_latency_s: seconds of an empty message between two machines.
        node_bytes_per_s: bytes per second that the ranks of one machine together send to others,
            over all the NICs that they reach, less what other groups take.
        bottleneck: the link that limits a ring over the group, such as "node0/nic0 - fabric".
        provenance: where the figure of that link comes from.
    """

    latency_s: float
    bytes_per_s: float
    node_latency_s: float
    node_bytes_per_s: float
    bottleneck: str
    provenance: str


def members(graph: nx.Graph, shape: GroupShape) -> list[list[str]]:
    """The devices of each group of a shape: consecutive ones of a machine, over machines in turn.

    Raises:
        ClusterError: the cluster has no room for such groups.
    """
    machines = list(by_node(devices_of(graph)).values())
    rows = min(map(len, machines)) // shape.ranks_per_node
    room = rows * (len(machines) // shape.nodes)
    if shape.groups > room:
        raise ClusterError(
            f"{shape}: this cluster of {len(machines)} machines with {min(map(len, machines))} "
            f"devices has room for {room} such groups"
        )
    groups = []
    for g in range(shape.groups):
        block, row = divmod(g, rows)
        own = machines[block * shape.nodes : (block + 1) * shape.nodes]
        first = row * shape.ranks_per_node
        groups.append([d for m in own for d in m[first : first + shape.ranks_per_node]])
    return groups


def levels(graph: nx.Graph, shape: GroupShape) -> Levels:
    """What every group of a shape gets while all of them run rings at once.

    Each group runs as many rings as its links carry, sharing its data out by their rates; links
    that several groups use are shared evenly. What is inside a machine is told from rings over the
    part of each group that lies there, what is between from rings over whole groups.
    """
    if shape.ranks < 2:
        raise ClusterError(f"{shape}: nothing to send")
    routes, groups = Routes(graph), members(graph, shape)
    parts = [part for group in groups for part in by_node(group).values()]
    whole, hops = _loads(routes, groups)
    link = routes.rate(whole)[1]
    far = [hop for hop in hops if node_of(hop[0]) != node_of(hop[1])]
    latency = max(routes.latency(*hop) for hop in far or hops)
    rate = routes.rate(
        {link: load for link, load in whole.items() if _leaves(graph, link)} or whole
    )
    near_latency, near_rate = latency, rate
    if shape.nodes > 1 and shape.ranks_per_node > 1:
        loads, hops = _loads(routes, parts)
        near_latency = max(routes.latency(*hop) for hop in hops)
        near_rate = routes.rate(loads)
    return Levels(
        latency_s=near_latency,
        bytes_per_s=near_rate[0],
        node_latency_s=latency,
        node_bytes_per_s=rate[0],
        bottleneck=f"{link[0]} - {link[1]}",
        provenance=graph.edges[link]["provenance"],
    )


def _loads(routes: Routes, groups: Sequence[Sequence[str]]) -> tuple[Counter[Link], list[Link]]:
    """What passes over each link while every group moves one unit round its rings, and the hops."""
    loads, hops = Counter[Link](), list[Link]()
    for group in groups:
        found = routes.rings(group)
        total = sum(ring.bytes_per_s for ring in found)
        for ring in found:
            for link in chain.from_iterable(ring.paths):
                loads[link] += ring.bytes_per_s / total  # type: ignore[assignment]
            hops += ring.hops
    return loads, hops


def _leaves(graph: nx.Graph, link: Link) -> bool:
    """Whether a link is part of the way out of a machine: one end is a NIC."""
    return any(graph.nodes[end]["kind"] in ("nic", "fabric") for end in link)
