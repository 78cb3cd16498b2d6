"""The topology of a cluster as a networkx graph.

Graph nodes are named "node0", "node0/gpu3", "node0/switch", "node0/nic1" and "fabric"; their
`kind` is one of KINDS. Edges are full-duplex links with `bytes_per_s` (one direction), `latency_s`
and `provenance`. A NIC serves the devices that it has a link to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import networkx as nx

from autopar.cost_model.cost import KINDS as PROVENANCE_KINDS
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape

KINDS = ("device", "switch", "nic", "host", "fabric")
_EDGE_FIELDS = ("bytes_per_s", "latency_s", "provenance")


@dataclass(frozen=True)
class Wire:
    """A kind of link.

    Attributes:
        bytes_per_s: bandwidth in each direction, in bytes/s.
        latency_s: latency of an empty message, in seconds.
        provenance: origin of the figures: "measured ...", "imported ...", "modelled ...".
    """

    bytes_per_s: float
    latency_s: float
    provenance: str

    def join(self, graph: nx.Graph, first: str, second: str, width: int = 1) -> None:
        """Links two graph nodes by `width` parallel wires."""
        graph.add_edge(
            first,
            second,
            bytes_per_s=self.bytes_per_s * width,
            latency_s=self.latency_s,
            provenance=self.provenance,
        )


Inside = Callable[[nx.Graph, str, Sequence[str]], None]
"""Adds the links inside one machine: (graph, "node0", its devices)."""


def switched(wire: Wire) -> Inside:
    """Links every device to one switch (NVSwitch, or a PCIe switch)."""

    def build(graph: nx.Graph, node: str, devices: Sequence[str]) -> None:
        graph.add_node(f"{node}/switch", kind="switch")
        for device in devices:
            wire.join(graph, device, f"{node}/switch")

    return build


def meshed(widths: Mapping[tuple[int, int], int], wire: Wire) -> Inside:
    """Links devices i and j by widths[i, j] wires (NVLink without a switch)."""

    def build(graph: nx.Graph, node: str, devices: Sequence[str]) -> None:
        for (i, j), width in widths.items():
            wire.join(graph, devices[i], devices[j], width)

    return build


def hosted(wire: Wire, root: Wire | None = None, per_switch: int = 1) -> Inside:
    """Links devices through the host: its memory, or PCIe without peer-to-peer access.

    Args:
        wire: link from a device to the host, or to its PCIe switch.
        root: link from a PCIe switch to the host; None without such switches.
        per_switch: devices behind one PCIe switch.
    """

    def build(graph: nx.Graph, node: str, devices: Sequence[str]) -> None:
        for index, device in enumerate(devices):
            if root is None:
                wire.join(graph, device, node)
                continue
            switch = f"{node}/pcie{index // per_switch}"
            graph.add_node(switch, kind="switch")
            wire.join(graph, device, switch)
            root.join(graph, switch, node)

    return build


def build(
    nodes: int,
    devices: int,
    inside: Inside | Sequence[Inside],
    nics: int = 0,
    nic: Wire | None = None,
    *,
    nic_at: Literal["device", "host"] = "device",
    device: str = "gpu",
    cpu: str = "intel",
) -> nx.Graph:
    """A cluster of equal machines behind one fabric.

    Args:
        nodes: number of machines.
        devices: devices of each machine.
        inside: links inside a machine: `switched`, `meshed`, `hosted`, or several of these.
        nics: NICs of each machine; required for more than one machine.
        nic: link from a NIC to the fabric, and from a NIC to its devices.
        nic_at: position of the NICs: spread evenly over the devices, or at the host.
        device: prefix of device names: "gpu" makes "node0/gpu3".
        cpu: vendor of the hosts' processors, an input of NCCL's model.
    """
    if nodes < 1 or devices < 1:
        raise ClusterError(f"a cluster of {nodes} nodes with {devices} devices each")
    if nodes > 1 and (nics < 1 or nic is None):
        raise ClusterError(f"{nodes} nodes without NICs cannot reach each other")
    graph = nx.Graph()
    for n in range(nodes):
        node = f"node{n}"
        graph.add_node(node, kind="host", cpu=cpu)
        names = [f"{node}/{device}{i}" for i in range(devices)]
        graph.add_nodes_from(names, kind="device")
        for part in [inside] if callable(inside) else inside:
            part(graph, node, names)
        if nic is not None:
            _add_nics(graph, node, names, nics, nic, nic_at)
    return check_topology(graph)


def _add_nics(
    graph: nx.Graph, node: str, devices: Sequence[str], nics: int, wire: Wire, at: str
) -> None:
    graph.add_node("fabric", kind="fabric")
    for j in range(nics):
        name = f"{node}/nic{j}"
        graph.add_node(name, kind="nic")
        wire.join(graph, name, "fabric")
        count = len(devices)
        near = {i for i in range(count) if i * nics // count == j} | {j * count // nics}
        for device in [devices[i] for i in sorted(near)] if at == "device" else [node]:
            wire.join(graph, device, name)


def node_of(name: str) -> str:
    """The machine of a graph node: "node0/gpu3" -> "node0"."""
    return name.partition("/")[0]


def devices_by_node(graph: nx.Graph) -> dict[str, list[str]]:
    """Devices of each machine, in the order of ranks."""
    devices: dict[str, list[str]] = {}
    for name, kind in graph.nodes(data="kind"):
        if kind == "device":
            devices.setdefault(node_of(name), []).append(name)
    return devices


def group_devices(graph: nx.Graph, shape: GroupShape) -> list[str]:
    """The devices of the first group of a shape: consecutive ones of each machine.

    Raises:
        ClusterError: the groups do not fit on the cluster.
    """
    machines = list(devices_by_node(graph).values())
    devices = min(map(len, machines))
    fitting = (devices // shape.ranks_per_node) * (len(machines) // shape.nodes)
    if shape.groups > fitting:
        raise ClusterError(
            f"{shape}: this cluster of {len(machines)} machines with {devices} devices has room "
            f"for {fitting} such groups"
        )
    return [d for machine in machines[: shape.nodes] for d in machine[: shape.ranks_per_node]]


def repeated(graph: nx.Graph, nodes: int) -> nx.Graph:
    """The topology with another number of machines: copies of the first, if all are alike.

    Raises:
        ClusterError: the machines differ, or the only one has no NIC.
    """
    machines = list(devices_by_node(graph))
    if nodes == len(machines):
        return graph
    first, *others = ({n for n in graph if node_of(n) == m} | {"fabric"} for m in machines)
    if any(not _alike(graph.subgraph(first), graph.subgraph(other)) for other in others):
        raise ClusterError(
            f"the {len(machines)} machines of this cluster differ: what {nodes} of them would do "
            f"must be measured"
        )
    if nodes > 1 and "fabric" not in graph:
        raise ClusterError(f"this machine has no NIC: nothing is known of {nodes} of them")
    result = nx.Graph()
    for n in range(nodes):
        names = {name: f"node{n}" + name.removeprefix(machines[0]) for name in first - {"fabric"}}
        result = nx.compose(result, nx.relabel_nodes(graph.subgraph(first), names))
    return result


def _alike(first: nx.Graph, second: nx.Graph) -> bool:
    widths = [sorted(w for *_, w in g.edges(data="bytes_per_s")) for g in (first, second)]
    return widths[0] == widths[1] and nx.vf2pp_is_isomorphic(first, second, node_label="kind")


def check_topology(graph: nx.Graph) -> nx.Graph:
    """The graph, if it describes a cluster.

    Raises:
        ClusterError: a node or link is malformed; the message names it.
    """
    for name, kind in graph.nodes(data="kind"):
        if not isinstance(name, str) or kind not in KINDS:
            raise ClusterError(f"topology: {name!r} is of kind {kind!r}, not one of {KINDS}")
    for first, second, link in graph.edges(data=True):
        where = f"topology: the link {first} - {second}"
        missing = [field for field in _EDGE_FIELDS if field not in link]
        if missing:
            raise ClusterError(f"{where} lacks {', '.join(missing)}")
        if not (link["bytes_per_s"] > 0 and link["latency_s"] >= 0):
            raise ClusterError(
                f"{where} has {link['bytes_per_s']} bytes/s and {link['latency_s']} s"
            )
        if not str(link["provenance"]).startswith(PROVENANCE_KINDS):
            raise ClusterError(f"{where}: provenance {link['provenance']!r}")
    if not devices_by_node(graph):
        raise ClusterError("topology: there is no device")
    return graph


def nics_per_node(graph: nx.Graph) -> int:
    """NICs of the first machine."""
    kinds: Any = graph.nodes(data="kind")
    return sum(kind == "nic" and node_of(name) == "node0" for name, kind in kinds)
