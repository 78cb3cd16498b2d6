"""The cluster as a networkx graph: devices, switches, NICs and the links between them.

Nodes are called "node0", "node0/gpu3", "node0/switch", "node0/nic1", "fabric"; their `kind` is one
of KINDS. An edge is a full-duplex link with `bytes_per_s` (one direction), `latency_s` and
`provenance`. A NIC belongs to the devices that it is linked to, so a path from a device to another
machine says which NIC it takes. `routes` finds rings and trees on such a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import networkx as nx

from autopar.cost_model.cost import KINDS as PROVENANCE_KINDS
from autopar.cost_model.cost import ClusterError

KINDS = ("device", "switch", "nic", "host", "fabric")
_EDGE_FIELDS = ("bytes_per_s", "latency_s", "provenance")


@dataclass(frozen=True)
class Wire:
    """A kind of link.

    Attributes:
        bytes_per_s: bytes per second in each direction.
        latency_s: seconds that an empty message takes.
        provenance: where the figures come from: "measured ...", "imported ...", "modelled ...".
    """

    bytes_per_s: float
    latency_s: float
    provenance: str

    def join(self, graph: nx.Graph, first: str, second: str, width: int = 1) -> None:
        """Link two nodes by `width` such wires side by side."""
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
    """Every device has a link of `wire` to one switch (NVSwitch, or a PCIe switch)."""

    def build(graph: nx.Graph, node: str, devices: Sequence[str]) -> None:
        graph.add_node(f"{node}/switch", kind="switch")
        for device in devices:
            wire.join(graph, device, f"{node}/switch")

    return build


def meshed(widths: Mapping[tuple[int, int], int], wire: Wire) -> Inside:
    """Devices i and j are linked by widths[i, j] wires (NVLink without a switch)."""

    def build(graph: nx.Graph, node: str, devices: Sequence[str]) -> None:
        for (i, j), width in widths.items():
            wire.join(graph, devices[i], devices[j], width)

    return build


def hosted(wire: Wire, root: Wire | None = None, per_switch: int = 1) -> Inside:
    """Devices meet in the host: through its memory, or over PCIe without peer-to-peer access.

    Args:
        wire: from a device to the host, or to its PCIe switch.
        root: from a PCIe switch to the host; None if there are no such switches.
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
        devices: devices of each.
        inside: what links the devices of one machine: `switched`, `meshed`, `hosted`, or several.
        nics: NICs of each; needed for more than one machine.
        nic: the link from a NIC to the fabric; the one to its devices is taken to be no slower.
        nic_at: whether NICs sit at the devices, spread evenly over them, or at the host.
        device: how devices are called: "gpu" makes "node0/gpu3".
        cpu: whose the hosts' processors are, kept at the hosts: NCCL's choices depend on it.
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
    """The machine that a graph node belongs to: "node0/gpu3" -> "node0"."""
    return name.partition("/")[0]


def devices_of(graph: nx.Graph) -> list[str]:
    """All devices in the order of ranks: machine by machine."""
    return [name for name, kind in graph.nodes(data="kind") if kind == "device"]


def by_node(devices: Sequence[str]) -> dict[str, list[str]]:
    """Devices grouped by machine, in the order given."""
    grouped: dict[str, list[str]] = {}
    for device in devices:
        grouped.setdefault(node_of(device), []).append(device)
    return grouped


def repeated(graph: nx.Graph, nodes: int) -> nx.Graph:
    """The same machines, more or fewer of them: the first is repeated if all are alike.

    Raises:
        ClusterError: the machines differ, or the only one has no NIC.
    """
    machines = list(by_node(devices_of(graph)))
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
    def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        return all(a.get(key) == b.get(key) for key in ("kind", "bytes_per_s", "latency_s"))

    return nx.vf2pp_is_isomorphic(first, second, node_label="kind") and sorted(
        w for *_, w in first.edges(data="bytes_per_s")
    ) == sorted(w for *_, w in second.edges(data="bytes_per_s"))


def check_topology(graph: nx.Graph) -> nx.Graph:
    """The graph, if it is one of a cluster.

    Raises:
        ClusterError: naming the node or link that is not as this module defines it.
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
    devices = devices_of(graph)
    if not devices:
        raise ClusterError("topology: there is no device")
    return graph
