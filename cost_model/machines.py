"""Topologies of known machines, from their data sheets: every figure modelled, none measured.

Bandwidths are those of the data sheets; latencies are NCCL 2.30's for a hop of a ring under LL
(0.6 us over NVLink, 1.0 over PCIe, 2.7 over the network), shared out over the links of the way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import networkx as nx

from autopar.cost_model.cost import ClusterError
from autopar.cost_model.topology import Wire, build, hosted, meshed, switched


def _nvswitch(links: int, sheet: str) -> Wire:
    """A device's links to the switch, 25 GB/s each."""
    return Wire(25e9 * links, 0.3e-6, f"modelled by {sheet}, {links} links of 25 GB/s")


def _nic(gbits: int, sheet: str) -> Wire:
    """A NIC: four links from device to device."""
    return Wire(gbits / 8 * 1e9, 2.7e-6 / 4, f"modelled by {sheet}, {gbits} Gbit/s")


# Links between the GPUs of a DGX-1 with V100, as nvidia-smi topo -m prints them (NV1, NV2).
_DGX_1 = {
    **dict.fromkeys([(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)], 1),
    **dict.fromkeys([(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)], 2),
}


def _dgx_1(nodes: int) -> nx.Graph:
    wire = Wire(25e9, 0.6e-6, "modelled by NVLink 2's data sheet, 25 GB/s a link")
    return build(nodes, 8, meshed(_DGX_1, wire), 2, _nic(100, "ConnectX-5"))


def _dgx_a100(nodes: int) -> nx.Graph:
    return build(nodes, 8, switched(_nvswitch(12, "NVLink 3")), 8, _nic(200, "ConnectX-6 HDR"))


def _dgx_h100(nodes: int) -> nx.Graph:
    return build(nodes, 8, switched(_nvswitch(18, "NVLink 4")), 8, _nic(400, "ConnectX-7 NDR"))


def _aws_p5(nodes: int) -> nx.Graph:
    nic = _nic(400, "p5.48xlarge's 4 EFA of 100 Gbit/s at each GPU, taken as one NIC")
    return build(nodes, 8, switched(_nvswitch(18, "NVLink 4")), 8, nic)


def _gcp_a3mega(nodes: int) -> nx.Graph:
    nic = _nic(200, "a3-megagpu-8g's gVNIC")
    return build(nodes, 8, switched(_nvswitch(18, "NVLink 4")), 8, nic)


def _rtx_4090(nodes: int) -> nx.Graph:
    wire = Wire(31.5e9, 0.5e-6, "modelled by PCIe 4.0 x16, through the host's memory")
    if nodes > 1:
        raise ClusterError("8x4090-pcie is one machine: nothing is known of its NICs")
    return build(1, 8, hosted(wire))


MACHINES: MappingProxyType[str, Callable[[int], nx.Graph]] = MappingProxyType(
    {
        "dgx-a100": _dgx_a100,
        "dgx-h100": _dgx_h100,
        "aws-p5": _aws_p5,
        "gcp-a3mega": _gcp_a3mega,
        "8x4090-pcie": _rtx_4090,
        "dgx-1v-roce": _dgx_1,
    }
)
"""Name -> the topology of so many nodes."""
