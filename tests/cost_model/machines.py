"""Topologies of equal machines."""

import networkx as nx

from autopar.cost_model.topology.topology import machine_count


def machines(
    nodes: int,
    devices: int,
    bytes_per_s: float,
    nics: int = 0,
    nic_bytes_per_s: float = 0.0,
    *,
    hub: str = "switch",
    cpu: str = "intel",
) -> nx.Graph:
    """Machines with devices at a switch ("switch") or the host (""), and NICs at the devices."""
    graph = nx.Graph()
    for n in range(nodes):
        node = f"node{n}"
        graph.add_node(node, kind="host", cpu=cpu)
        names = [f"{node}/gpu{i}" for i in range(devices)]
        graph.add_nodes_from(names, kind="device")
        if hub:
            graph.add_node(f"{node}/{hub}", kind="switch")
        for name in names:
            link(graph, name, f"{node}/{hub}" if hub else node, bytes_per_s)
        for j in range(nics):
            graph.add_node("fabric", kind="fabric")
            graph.add_node(f"{node}/nic{j}", kind="nic")
            link(graph, f"{node}/nic{j}", "fabric", nic_bytes_per_s)
            near = {i for i in range(devices) if i * nics // devices == j} | {j * devices // nics}
            for i in sorted(near):
                link(graph, names[i], f"{node}/nic{j}", nic_bytes_per_s)
    return graph


def every_machine(graph: nx.Graph) -> nx.Graph:
    """The whole graph of a topology that describes the first of alike machines."""
    copies = [
        nx.relabel_nodes(graph, {name: name.replace("node0", f"node{n}") for name in graph})
        for n in range(machine_count(graph))
    ]
    whole = nx.compose_all(copies)
    whole.graph.clear()
    return whole


def link(graph: nx.Graph, one: str, other: str, bytes_per_s: float) -> None:
    graph.add_edge(
        one, other, bytes_per_s=bytes_per_s, latency_s=1e-6, provenance="modelled by the test"
    )
