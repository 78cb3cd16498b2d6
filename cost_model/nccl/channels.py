"""Channels that NCCL finds on a machine and their bandwidths: the input of its tuning model.

`NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=GRAPH` prints the real ones. Bandwidths are in GB/s (1e9
bytes/s), as in NCCL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.constants import ALGORITHMS, GENERATIONS
from autopar.cost_model.topology.topology import group_devices, node_of

if TYPE_CHECKING:
    import networkx as nx

PATHS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "PXN", "P2C", "PHB", "SYS", "NET", "DIS")
"""Kinds of path between two devices, nearest first, as NCCL prints them."""

CAPABILITIES = {"V100": 70, "A100": 80, "A800": 80, "H100": 90, "H800": 90, "H200": 90, "B200": 100}
"""Compute capability of devices with NVSwitches or meshes, by a part of their name."""

_MAX_CHANNELS = 32
_NVLINK = {70: (25, 20.0), 80: (25, 20.0), 90: (25, 20.6), 100: (50, 40.1)}
"""GB/s of a link by its data sheet, and as NCCL counts it (src/graph/topo.h)."""
_INTRA = {
    80: (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3),
    90: (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3),
    100: (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18),
}
_INTER = {
    80: (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    90: (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    100: (
        *(96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20),
        *(17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    ),
}
"""Bandwidths that NCCL's search tries for a channel (src/graph/search.cc)."""


@dataclass(frozen=True)
class Graph:
    """The channels of one algorithm: their number, and GB/s of each inside and between nodes.

    Attributes:
        path_intra: worst path inside a node, one of PATHS.
        path_inter: worst path from a device to its NIC, one of PATHS.
        plain_tree: whether the pattern is TREE, not BALANCED_TREE or SPLIT_TREE.
    """

    channels: int
    intra: float
    inter: float
    path_intra: str = "NVL"
    path_inter: str = "PXB"
    plain_tree: bool = False

    def __post_init__(self) -> None:
        if self.path_intra not in PATHS or self.path_inter not in PATHS:
            paths = f"{self.path_intra}, {self.path_inter}"
            raise ClusterError(f"{paths}: paths are {', '.join(PATHS)}")
        if self.channels < 1 or not (self.intra > 0 and self.inter > 0):
            raise ClusterError(f"an NCCL graph needs channels and bandwidths, this is {self}")


@dataclass(frozen=True)
class Communicator:
    """A group of ranks on evenly filled nodes, and the channels between them.

    Attributes:
        capability: least compute capability: 80 for A100, 90 for H100.
        graphs: channels by algorithm; algorithms without any are unavailable. PAT uses the ring's.
        cpu: "intel", "amd", "mixed", "arm" or "power": decides the cost of posting to the network.
    """

    ranks: int
    nodes: int
    capability: int
    graphs: Mapping[str, Graph]
    cpu: str = "intel"

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks < 2 or self.ranks % self.nodes:
            raise ClusterError(f"{self.ranks} ranks do not fill {self.nodes} nodes evenly")
        unknown = set(self.graphs) - set(ALGORITHMS)
        if unknown or not {"ring", "tree"} <= set(self.graphs):
            raise ClusterError(f"NCCL graphs: ring, tree and others of {ALGORITHMS}, not {unknown}")

    @property
    def generation(self) -> str:
        return GENERATIONS[sum(self.capability >= least for least in (80, 90, 100))]

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def channels(self) -> int:
        """Channels of a ring or tree at work: NCCL uses each one twice."""
        found = min(self.graphs["ring"].channels, self.graphs["tree"].channels)
        return min(2 * found, _MAX_CHANNELS)


def behind_switch(
    shape: GroupShape, capability: int, device_gbps: float, nics: int = 0, nic_gbps: float = 0.0
) -> dict[str, Graph]:
    """The channels of a group whose devices are behind one switch on each node.

    Simplifies src/graph/search.cc, and gives the known graphs of DGX A100, DGX H100 and p4d. On one
    node a channel has the first bandwidth of NCCL's list that a device carries. On more nodes
    there is one channel for each of the `nics` that the group's devices on one node reach. GB/s are
    as NCCL counts them: 12 for 100 Gbit/s.
    """
    era = max(least for least in _INTRA if least <= max(capability, 80))
    if shape.nodes == 1:
        speed = _first(_INTRA[era], device_gbps)
        graph = _channels(int(device_gbps // speed), speed, capability)
        nvls_speed = _first(_INTRA[era], device_gbps / 16)
        nvls = Graph(16, nvls_speed, 2 * nvls_speed)  # `inter` must not limit
    else:
        if nics < 1:
            raise ClusterError(f"{shape}: NCCL needs a NIC on every node")
        speed = _first(_INTER[era], min(nic_gbps, device_gbps / nics))
        graph = _channels(nics, speed, capability, alone=shape.ranks_per_node == 1)
        nvls = Graph(nics, _first(_INTRA[era], device_gbps / nics), speed)
    plain = replace(graph, plain_tree=capability >= 90)  # no balanced trees from Hopper on
    graphs = {"ring": graph, "tree": plain}
    if capability >= 90 and shape.ranks_per_node > 1:
        graphs |= {"nvls": nvls, "nvls_tree": nvls}
    return graphs


def _first(speeds: Sequence[float], most: float) -> float:
    return next((float(speed) for speed in speeds if speed <= most), float(speeds[-1]))


def _channels(count: int, speed: float, capability: int, *, alone: bool = False) -> Graph:
    """Channels of a speed in GB/s; wide ones are split into two."""
    whole = speed < 25 or (capability > 80 and speed < 50 and count > 4)
    split = min(count if whole else 2 * count, _MAX_CHANNELS // 2)
    speed = speed if whole else speed / -(-split // count)
    return Graph(split, speed, speed, path_intra="LOC" if alone else "NVL")


def communicator_on(graph: nx.Graph, shape: GroupShape, device: str) -> Communicator:
    """The communicator of one group on a cluster with devices behind NVSwitches.

    Raises:
        ClusterError: the channels on such a cluster are unknown.
    """
    capability = next((cc for part, cc in CAPABILITIES.items() if part in device), None)
    devices = group_devices(graph, GroupShape(shape.ranks, shape.ranks_per_node))
    wires = [
        graph.edges[d, n]["bytes_per_s"] for d in devices for n in graph[d] if n.endswith("/switch")
    ]
    if capability is None or len(wires) < len(devices):
        raise ClusterError(
            f"NCCL's channels among {device} on this fabric are not known, only behind NVSwitches: "
            f"read its graphs from NCCL_DEBUG=INFO"
        )
    sheet, counted = _NVLINK[capability]
    first = devices[: shape.ranks_per_node]
    kinds = graph.nodes(data="kind")
    nics = {n for d in first for n in graph[d] if kinds[n] == "nic"}
    network = sum(graph.edges[n, "fabric"]["bytes_per_s"] for n in nics) / 12.5e9 * 12
    rails = min(len(nics), len(first))  # NICs of one device count as one, as on EFA
    device_gbps = min(wires) / 1e9 / sheet * counted
    graphs = behind_switch(shape, capability, device_gbps, rails, network / max(1, rails))
    cpu = graph.nodes[node_of(devices[0])].get("cpu", "intel")
    return Communicator(shape.ranks, shape.nodes, capability, graphs, cpu)
