"""Bytes that leave a node while its ranks communicate.

`ring` says what a rank sends; most of it may go to a neighbour on its own node. What a node's link
carries, and what its interface counts, is less. Gloo's messages over TCP weigh more than what they
bring: two constants, as counted, make small messages right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.cost_model.collectives import Transfer, check_collective, collective_of, ring
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from autopar.ir.graph import TrainingGraph

MESSAGE_BYTES = 430
"""What interfaces count for a message of gloo beside its payload: headers, acknowledgements, and
notices that sender and receiver are ready. Counted at 2 and 4 nodes, 1 KiB to 4 MiB."""

HEADERS = 1.002
"""Bytes on the wire per byte of a large message, in frames of 64 KiB."""

_SEGMENTS = 2  # in which gloo's rings pass on each rank's chunk


def sent_bytes(graph: TrainingGraph, backend: str) -> dict[str, int]:
    """Bytes that a rank sends over each axis in one run of a lowered graph.

    Args:
        graph: a lowered graph.
        backend: of torch.distributed.
    """
    found: Counter[str] = Counter()
    for sent in _transfers(graph, 1):
        share = ring(sent.collective, sent.shape.ranks, backend)[1]
        found[sent.axis] += round(share * sent.nbytes)
    return dict(found)


def node_bytes(graph: TrainingGraph, backend: str, ranks_per_node: int) -> int:
    """Bytes that leave the node that sends most in one run of a lowered graph by all its ranks.

    Args:
        graph: a lowered graph.
        backend: of torch.distributed.
        ranks_per_node: ranks of the world on each node.
    """
    total = 0.0
    for sent in _transfers(graph, ranks_per_node):
        args = (sent.collective, sent.shape, backend, ranks_per_node)
        payload = leaving(*args) * sent.nbytes
        total += (
            HEADERS * payload + MESSAGE_BYTES * messages(*args) if backend == "gloo" else payload
        )
    return round(total)


def _transfers(graph: TrainingGraph, ranks_per_node: int) -> Iterator[Transfer]:
    for node in graph.calls():
        if collective_of(node) is not None:
            yield Transfer.of(node, graph.axes, ranks_per_node)


def leaving(collective: str, shape: GroupShape, backend: str, ranks_per_node: int) -> float:
    """Bytes that leave a node for a collective, as a multiple of its message size.

    Rings run in the order of ranks, so one of their links leaves each node, however many ranks
    are on it. An all-to-all sends each part straight to its rank. Groups that run at once add up.

    Args:
        collective: one of COLLECTIVES; its message size is meant as there.
        shape: the groups that run at once, each over neighbouring nodes.
        backend: of torch.distributed.
        ranks_per_node: ranks of the world on each node.

    Returns:
        The multiple for the node that sends most: of a broadcast that of the root; 0.0 where a
        group lies on one node.

    Raises:
        ClusterError: there is no such collective, or the groups are no part of such nodes.
    """
    check_collective(collective)
    if ranks_per_node % shape.ranks_per_node:
        raise ClusterError(f"{shape} do not fill nodes of {ranks_per_node} ranks")
    if shape.nodes == 1:
        return 0.0
    groups = ranks_per_node // shape.ranks_per_node
    return groups * _of_one(collective, shape, backend)


def messages(collective: str, shape: GroupShape, backend: str, ranks_per_node: int) -> int:
    """Messages that leave a node for a collective; the arguments are those of `leaving`."""
    if shape.nodes == 1:
        return 0
    groups, own = ranks_per_node // shape.ranks_per_node, shape.ranks_per_node
    if collective == "all_to_all":
        return groups * own * (shape.ranks - own)
    if collective in ("broadcast", "send"):
        return round(leaving(collective, shape, backend, ranks_per_node))
    return groups * _SEGMENTS * ring(collective, shape.ranks, backend)[0]


def _of_one(collective: str, shape: GroupShape, backend: str) -> float:
    own, others = shape.ranks_per_node, shape.ranks - shape.ranks_per_node
    if collective == "all_to_all":
        return own * others / shape.ranks
    if collective == "broadcast" and backend == "gloo":
        return float(_tree_links(shape))
    return ring(collective, shape.ranks, backend)[1]


def _tree_links(shape: GroupShape) -> int:
    """Links of a binomial tree that leave the node of its root, rank 0."""
    ends, step = [], 1
    while step < shape.ranks:
        ends += [rank + step for rank in range(min(step, shape.ranks_per_node))]
        step *= 2
    return sum(shape.ranks_per_node <= end < shape.ranks for end in ends)
