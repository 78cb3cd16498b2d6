"""The topology of a measured cluster of CPUs, from sends between pairs of ranks."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx

from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.topology.topology import Wire, build, hosted

_NEAR_HOPS = 2  # a rank, its host, another rank
_FAR_HOPS = 4  # additional: host, NIC, fabric, NIC, host


def topology_from_pairs(
    curves: Mapping[CurveKey, Measured], nodes: int, ranks_per_node: int
) -> nx.Graph | None:
    """A graph of ranks at their hosts, and hosts with one NIC each at a fabric.

    Rates and latencies are those of a pair on one node, and of a pair on two. Links of GPUs cannot
    be derived from these, so this is for ranks on CPUs.

    Args:
        curves: curves of a measured cluster, of which "send" is used.
        nodes: number of nodes.
        ranks_per_node: ranks on each node.

    Returns:
        The graph; None if a pair was not measured.
    """
    messages = {key.shape: entry for key, entry in curves.items() if key.collective == "send"}
    near, far = messages.get(GroupShape(2, 2)), messages.get(GroupShape(2, 1))
    if (ranks_per_node > 1 and near is None) or (nodes > 1 and far is None):
        return None
    within = near or far
    if within is None:
        return None
    latency = _latency(near.curve) if near else 0.0
    inside = Wire(_rate(within.curve), latency / _NEAR_HOPS, within.provenance)
    if far is None or nodes == 1:
        return build(nodes, ranks_per_node, hosted(inside), device="rank")
    beyond = max(0.0, _latency(far.curve) - latency)
    nic = Wire(_rate(far.curve), beyond / _FAR_HOPS, far.provenance)
    return build(nodes, ranks_per_node, hosted(inside), 1, nic, nic_at="host", device="rank")


def _latency(curve: Curve) -> float:
    return curve.seconds[0]


def _rate(curve: Curve) -> float:
    """Bytes per second of the largest messages, latency apart."""
    whole = curve.seconds[-1] - min(curve.pieces[-1].latency_s, curve.seconds[-1] / 2)
    return curve.bytes[-1] / whole
