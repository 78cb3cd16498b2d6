"""Bytes that leave a node while its ranks communicate.

`ring` gives the bytes that a rank sends, of which most may go to a neighbour on its own node.
Gloo's messages over TCP have more bytes than their payload; two constants, counted on interfaces,
correct that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import collective_of
from autopar.cost_model.collectives import Transfer, check_collective, ring
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape

MESSAGE_BYTES = 430
"""Bytes of a gloo message beside its payload: headers, acknowledgements, and notices that sender
and receiver are ready. Counted at 2 and 4 nodes, 1 KiB to 4 MiB."""

HEADERS = 1.002
"""Bytes on the wire per byte of a large message, in frames of 64 KiB."""

_SEGMENTS = 2  # messages of gloo's rings for each rank's chunk


def sent_bytes(graph: TrainingGraph, backend: str) -> dict[str, int]:
    """Bytes that a rank sends over each axis in one run of a lowered graph."""
    by_axis: Counter[str] = Counter()
    for transfer in _transfers(graph, 1):
        share = ring(transfer.collective, transfer.shape.ranks, backend)[1]
        by_axis[transfer.axis] += round(share * transfer.nbytes)
    return dict(by_axis)


def node_bytes(graph: TrainingGraph, backend: str, ranks_per_node: int) -> int:
    """Bytes that leave the busiest node in one run of a lowered graph by all ranks."""
    total = 0.0
    for transfer in _transfers(graph, ranks_per_node):
        args = (transfer.collective, transfer.shape, backend, ranks_per_node)
        payload = leaving(*args) * transfer.nbytes
        if backend == "gloo":
            payload = HEADERS * payload + MESSAGE_BYTES * messages(*args)
        total += payload
    return round(total)


def _transfers(graph: TrainingGraph, ranks_per_node: int) -> Iterator[Transfer]:
    for node in graph.calls():
        if collective_of(node) is not None:
            yield Transfer.of(node, graph.axes, ranks_per_node)


def leaving(collective: str, shape: GroupShape, backend: str, ranks_per_node: int) -> float:
    """Bytes that leave the busiest node for a collective, as a multiple of its message size.

    Rings follow the order of ranks, so one of their links leaves each node. An all-to-all sends
    each part directly to its rank. The busiest node of a broadcast is the root's. Groups that run
    at once, each over neighbouring nodes, add up.

    Raises:
        ClusterError: the collective is unknown, or the groups do not fill such nodes.
    """
    check_collective(collective)
    if ranks_per_node % shape.ranks_per_node:
        raise ClusterError(f"{shape} do not fill nodes of {ranks_per_node} ranks")
    if shape.nodes == 1:
        return 0.0
    groups = ranks_per_node // shape.ranks_per_node
    near, others = shape.ranks_per_node, shape.ranks - shape.ranks_per_node
    if collective == "all_to_all":
        return groups * (near * others / shape.ranks)
    if collective == "broadcast" and backend == "gloo":
        # Links of a binomial tree that leave the node of its root, rank 0.
        steps = (2**power for power in range((shape.ranks - 1).bit_length()))
        ends = [step + rank for step in steps for rank in range(min(step, near))]
        return float(groups * sum(near <= end < shape.ranks for end in ends))
    return groups * ring(collective, shape.ranks, backend)[1]


def messages(collective: str, shape: GroupShape, backend: str, ranks_per_node: int) -> int:
    """Messages that leave a node for a collective; the arguments are as for `leaving`."""
    if shape.nodes == 1:
        return 0
    groups, near = ranks_per_node // shape.ranks_per_node, shape.ranks_per_node
    if collective == "all_to_all":
        return groups * near * (shape.ranks - near)
    if collective in ("broadcast", "send"):
        return round(leaving(collective, shape, backend, ranks_per_node))
    return groups * _SEGMENTS * ring(collective, shape.ranks, backend)[0]
