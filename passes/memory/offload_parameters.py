"""Reads parameters that lie on a lower level of memory before their uses.

Programs could read the mapped files in place, but page faults come at no certain point and in no
budget of memory. Copies fetched ahead have both, and the simulator counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from torch import fx

from autopar.core.ir.aliases import find_storages
from autopar.core.ir.graph import GraphProperty, TrainingGraph, tensor_bytes
from autopar.core.ir.roles import Parameter
from autopar.core.operators import parameters
from autopar.core.operators.parameters import fetch, fetched
from autopar.passes.core.node_builder import recompute
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.memory.read_ahead import Group, Read, read_ahead


@dataclass(frozen=True)
class OffloadParameters(Pass):
    """Reads parameters from the lower level in the forward, and again in the backward.

    Before: a joint graph in its final order. After: no operator reads a large parameter, but a
    copy that is fetched before its first reader and freed after its last; one copy in the forward,
    another in the backward, which takes its own views. Parameters that the program writes or
    returns are read in place. Tier: exact.

    Attributes:
        folder: folder on the storage; "" for host memory, under GPUs.
    """

    ensures: ClassVar[frozenset[GraphProperty]] = frozenset({GraphProperty.PARAMETERS_OFFLOADED})

    folder: str = "."

    def __call__(self, graph: TrainingGraph) -> PassResult:
        changed = graph.copy()
        views = views_of_stored(changed)
        if not views:
            return PassResult(graph, "no parameter is worth it")
        nodes = list(changed.graph.nodes)
        start = nodes.index(changed.backward_start)
        again = frozenset[fx.Node]().union(*views.values())
        recompute(changed.graph, nodes[start:-1], again.__contains__, recomputed=True)
        calls = list(changed.calls())
        at = calls.index(changed.backward_start) if start < len(nodes) - 1 else len(calls)
        for half in (calls[:at], calls[at:]):
            if half:
                read_ahead(changed.graph, list(_reads(views, half, self.folder)), half[0])
        return PassResult(changed)


def views_of_stored(graph: TrainingGraph) -> dict[fx.Node, frozenset[fx.Node]]:
    """Parameters that are fetched, and the nodes of the forward whose values lie in each."""
    nodes = list(graph.graph.nodes)
    early = set(nodes[: nodes.index(graph.backward_start)])
    results = set(graph.results)
    _, behind = find_storages(graph.graph)
    found = {}
    for node, role in zip(graph.placeholders, graph.inputs, strict=True):
        if not isinstance(role, Parameter) or nbytes(node) < parameters.LEAST_BYTES:
            continue
        (storage,) = behind[node]
        inside = [n for n, storages in behind.items() if storage in storages]
        if not results.intersection(inside) and not any(map(_writes, inside)):
            found[node] = frozenset(early.intersection(inside) - {node})
    return found


def _reads(stored: Iterable[fx.Node], half: list[fx.Node], folder: str) -> Iterator[Group]:
    """Reads of the parameters that operators of one half of the program read."""
    place = {node: index for index, node in enumerate(half)}
    reads = []
    for node in stored:
        if readers := sorted(place.keys() & node.users.keys(), key=place.__getitem__):
            reads.append(Read(node, readers, nbytes(node), (fetch, node, folder), (fetched,)))
    reads.sort(key=lambda read: place[read.readers[0]])
    for _, group in groupby(reads, key=lambda read: read.readers[0]):
        yield list(group)


def nbytes(node: fx.Node) -> int:
    """Bytes of a parameter on this rank."""
    return tensor_bytes(node.meta["val"])


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
