"""Keeps saved activations on a lower level of memory between forward and backward.

Kept activations fill memory until the backward, and recomputing them costs compute. Transfers to
and from a lower level run beside compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autopar._torch import OpOverload
from autopar.core.ir.aliases import extent_bytes, find_storages
from autopar.core.ir.graph import GraphProperty, TrainingGraph, tensors
from autopar.core.ir.messages import collective_of, is_wait
from autopar.core.operators.offload import offload, offloaded, prefetch, prefetched
from autopar.passes.core.node_builder import call, recompute
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.core.routed_values import routed_values
from autopar.passes.memory.read_ahead import AHEAD, Read, read_ahead

LEAST_BYTES = 64 << 10
"""Smaller values stay in memory: a transfer of one costs more than its bytes are worth."""


@dataclass(frozen=True)
class OffloadActivations(Pass):
    """Writes saved activations to a lower level in the forward, and reads them before their use.

    Before: a joint graph in its final order. After: each chosen value is written once it is
    computed, and its memory is free after its last use in the forward. Its read begins some values
    before the first reader in the backward; views of it are taken again. Values that the forward
    saves last stay in memory, because the backward reads them first. Tier: exact.

    Attributes:
        blocks: blocks whose activations are offloaded; "" is the code outside of blocks.
        folder: folder on the storage; "" for host memory, under GPUs.
        least_bytes: size of the smallest value to offload.
    """

    ensures: ClassVar[frozenset[GraphProperty]] = frozenset({GraphProperty.ACTIVATIONS_OFFLOADED})

    blocks: tuple[str, ...] = ("",)
    folder: str = "."
    least_bytes: int = LEAST_BYTES

    def __call__(self, graph: TrainingGraph) -> PassResult:
        if graph.backward_start.op == "output":
            return PassResult(graph, "there is no backward")
        changed = graph.copy()
        # A value is read into memory of the size that the graph says, before its size is known.
        unsized = routed_values(changed.graph)
        found = [v for v in saved_values(changed) if v.nbytes >= self.least_bytes]
        found = [v for v in found if v.node not in unsized]
        found = found[: len(found) - _num_kept([value.nbytes for value in found])]
        found = [v for v in found if (v.node.meta.get("block") or "") in self.blocks]
        if not found:
            return PassResult(graph, "no saved value is worth it")
        _take_views_again(changed, found)
        window = AHEAD * max(value.nbytes for value in found)
        tickets = _write(changed, found, self.folder, window)
        _read(changed, found, tickets, self.folder)
        return PassResult(changed)


@dataclass(frozen=True, eq=False)
class SavedValue:
    """Memory that the forward fills and the backward reads.

    Attributes:
        node: first node whose value is all of it.
        views: nodes of the forward whose values lie in it, without `node`.
        nbytes: its size in bytes.
    """

    node: fx.Node
    views: frozenset[fx.Node]
    nbytes: int


def saved_values(graph: TrainingGraph) -> Iterator[SavedValue]:
    """Saved values of the forward, in order; without gathered parameters, results and inputs."""
    nodes = list(graph.graph.nodes)
    start = nodes.index(graph.backward_start)
    late, results = set(nodes[start:]), set(graph.results)
    storages, behind = find_storages(graph.graph)
    members: list[list[fx.Node]] = [[] for _ in storages]
    for node, indices in behind.items():
        for index in set(indices):
            members[index].append(node)
    found = []
    for storage, inside in zip(storages, members, strict=True):
        early = [node for node in inside if node not in late]
        read = [n for n in early if any(u in late and u.op != "output" for u in n.users)]
        special = any(n in results or n.meta.get("gathered") or _writes(n) for n in inside)
        if storage.creator.op != "call_function" or not read or special:
            continue
        whole = _first_whole(early, storage.nbytes)
        if whole is not None and early.index(whole) <= min(map(early.index, read)):
            views = frozenset(early[early.index(whole) + 1 :])
            found.append(SavedValue(whole, views, storage.nbytes))
    place = {node: index for index, node in enumerate(nodes)}
    return iter(sorted(found, key=lambda value: place[value.node]))


def _first_whole(nodes: Sequence[fx.Node], nbytes: int) -> fx.Node | None:
    """The first node whose value is all of a storage, after the wait of a collective."""
    sent = any(collective_of(node) for node in nodes)
    for node in nodes:
        whole = [extent_bytes(tensor) for tensor in tensors(node)] == [nbytes]
        is_list = isinstance(node.meta["val"], (list, tuple))
        if whole and not is_list and (is_wait(node) or not sent):
            return node
    return None


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _num_kept(sizes: Sequence[int]) -> int:
    """Number of the last values that stay: at least one, as large as the largest before."""
    for count in range(1, len(sizes)):
        if sum(sizes[-count:]) >= max(sizes[:-count]):
            return count
    return len(sizes)


def _take_views_again(graph: TrainingGraph, found: Iterable[SavedValue]) -> None:
    """Lets the backward take its own views of the values."""
    # A view that is saved in the forward would keep the memory of its value.
    views = frozenset[fx.Node]().union(*(value.views for value in found))
    nodes = list(graph.graph.nodes)
    backward = nodes[nodes.index(graph.backward_start) : -1]
    recompute(graph.graph, backward, views.__contains__, recomputed=True)


def _write(
    graph: TrainingGraph, found: Sequence[SavedValue], folder: str, window: int
) -> list[fx.Node]:
    """Writes each value once it exists; at most `window` bytes at once. Returns the tickets."""
    tickets: list[fx.Node] = []
    first = 0
    for index, value in enumerate(found):
        flying = sum(each.nbytes for each in found[first : index + 1])
        with graph.graph.inserting_before(value.node.next):
            while flying > window and first < index:
                tickets[first] = call(
                    graph.graph, found[first].node, offloaded, tickets[first], found[first].node
                )
                flying -= found[first].nbytes
                first += 1
            tickets.append(call(graph.graph, value.node, offload, value.node, folder))
    with graph.graph.inserting_before(graph.backward_start):
        for index in range(first, len(found)):
            node = found[index].node
            tickets[index] = call(graph.graph, node, offloaded, tickets[index], node)
    return tickets


def _read(
    graph: TrainingGraph, found: Sequence[SavedValue], tickets: Sequence[fx.Node], folder: str
) -> None:
    """Reads each value before its first reader in the backward."""
    nodes = list(graph.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    late = set(nodes[place[graph.backward_start] : -1])
    groups = []
    for value, ticket in zip(found, tickets, strict=True):
        readers = sorted(late.intersection(value.node.users), key=place.__getitem__)
        like = value.node.meta["val"]
        size, stride = list(like.shape), list(like.stride())
        begin = (prefetch, ticket, folder, size, stride, like.dtype, like.device)
        groups.append([Read(value.node, readers, value.nbytes, begin, (prefetched, ticket))])
    read_ahead(graph.graph, groups, graph.backward_start)
