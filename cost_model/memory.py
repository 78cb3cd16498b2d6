"""`simulate_memory`: the peak of tensor bytes in one step, by liveness of storages.

A storage lives from the node that allocates it to the last use of any node whose value lies in it.
Parameters, buffers, constants, optimizer state and the inputs of the call (which the caller holds)
live throughout; gradients, outputs and what else is returned to the end; what a collective reads,
until the collective has been waited for. While a node runs, its results and its arguments both
exist. Not counted: what kernels allocate for themselves, and the optimizer's own step.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.cost_model.aliases import Storage, find_storages
from autopar.cost_model.collectives import collective_of, is_wait
from autopar.graph import (
    Accumulated,
    Buffer,
    Gradient,
    Held,
    Input,
    Output,
    OutputRole,
    Parameter,
    Saved,
    TrainingGraph,
    Update,
)

CATEGORIES = (
    "parameters",
    "optimizer",
    "gradients",
    "buffers",
    "inputs",
    "outputs",
    "gathered",
    "buckets",
    "saved",
    "transient",
)
"""Each byte is in one: constants of the model in buffers, in gradients if it will be returned as
one, in gathered if it is a whole parameter put together from shards, in buckets if a collective
reads or writes it, in saved if the backward needs it from the forward, otherwise in transient."""

_CUDA_ROUND = 512  # bytes: the granularity of torch's CUDA caching allocator


@dataclass(frozen=True)
class Memory:
    """Tensor bytes of one step on one rank.

    Attributes:
        peak: the largest number of bytes that exist at once.
        peak_node: the operator during which they do.
        by_category: the bytes of each of CATEGORIES then.
        curve: the bytes that exist while each operator of `graph.calls()` runs.
    """

    peak: int
    peak_node: str
    by_category: Mapping[str, int]
    curve: tuple[int, ...]


def simulate_memory(graph: TrainingGraph, *, optimizer_state_ratio: float = 2.0) -> Memory:
    """The memory of one training step.

    Args:
        graph: a lowered graph.
        optimizer_state_ratio: bytes of optimizer state for each byte of trained parameter.
    """
    life = _Life(graph)
    count = len(life.nodes)
    changes = np.zeros((len(CATEGORIES), count + 1), dtype=np.int64)
    for storage, holders in zip(life.storages, life.holders, strict=True):
        row = CATEGORIES.index(life.category(storage, holders))
        nbytes = _rounded(storage)
        changes[row, life.start(storage)] += nbytes
        changes[row, life.end(storage, holders) + 1] -= nbytes
    state = round(life.trained_bytes() * optimizer_state_ratio)
    changes[CATEGORIES.index("optimizer"), 0] += state

    live = changes.cumsum(axis=1)[:, :count]
    total = live.sum(axis=0)
    calls = [index for index, node in enumerate(life.nodes) if node.op == "call_function"]
    peak = max(calls, key=lambda index: total[index], default=count - 1)
    return Memory(
        peak=int(total[peak]),
        peak_node=life.nodes[peak].name,
        by_category={name: int(live[row, peak]) for row, name in enumerate(CATEGORIES)},
        curve=tuple(int(total[index]) for index in calls),
    )


class _Life:
    """Who makes, holds and uses each storage of a graph.

    Attributes:
        nodes: all nodes in order; `at` is the index of each.
        storages: all storages; `holders` the nodes whose value lies in each.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self.graph = graph
        self.nodes = list(graph.graph.nodes)
        self.at = {node: index for index, node in enumerate(self.nodes)}
        self.storages, self.behind = find_storages(graph.graph)
        self.holders: list[list[fx.Node]] = [[] for _ in self.storages]
        for node, indices in self.behind.items():
            for index in set(indices):
                self.holders[index].append(node)
        self.role = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self.returned: dict[fx.Node, list[OutputRole]] = {}
        for role, result in zip(graph.outputs, graph.results, strict=True):
            if result is not None:
                self.returned.setdefault(result, []).append(role)
        self.backward = self.at[graph.backward_start]

    def start(self, storage: Storage) -> int:
        """The index of the first node during which a storage exists."""
        return self.at[storage.maker] if storage.maker.op == "call_function" else 0

    def end(self, storage: Storage, holders: list[fx.Node]) -> int:
        """The index of the last node during which a storage exists."""
        role = self.role.get(storage.maker)
        if isinstance(role, (Parameter, Buffer, Input)) or storage.maker.op == "get_attr":
            return len(self.nodes) - 1
        return max(self._let_go(node) for node in holders)

    def _let_go(self, node: fx.Node) -> int:
        """The index of the last node that needs this one's value."""
        index = self.at[node]
        last = index
        for user in node.users:
            if user.op != "output":
                last = max([last, self.at[user], *(self.at[w] for w in _waits(user))])
            elif not all(isinstance(role, Update) for role in self.returned[node]):
                last = len(self.nodes) - 1
            elif index < self.backward:  # copied into the buffer when the forward returns
                last = max(last, self.backward - 1)
        return last

    def category(self, storage: Storage, holders: list[fx.Node]) -> str:
        """The one of CATEGORIES that a storage belongs to."""
        role = self.role.get(storage.maker)
        for kind, name in _INPUTS.items():
            if isinstance(role, kind):
                return name
        roles = [role for node in holders for role in self.returned.get(node, ())]
        users = [user for node in holders for user in node.users]
        collectives = [collective_of(node) for node in (*holders, *users)]
        if storage.maker.op == "get_attr":
            return "buffers"
        if any(isinstance(role, (Gradient, Held)) for role in roles):
            return "gradients"
        if any(isinstance(role, Output) for role in roles):
            return "outputs"
        if any(collective_of(n) == "all_gather" or n.meta.get("gathered") for n in holders):
            return "gathered"
        if any(collectives):
            return "buckets"
        made = self.at[storage.maker]
        if made < self.backward and any(
            user.op != "output" and self.at[user] >= self.backward for user in users
        ):
            return "saved"
        return "transient"

    def trained_bytes(self) -> int:
        """Bytes of this rank's part of the parameters that have gradients."""
        parameters = self.graph.parameters
        return sum(
            self.storages[index].nbytes
            for node, role in self.role.items()
            if isinstance(role, Parameter) and parameters[role.name].requires_grad
            for index in self.behind[node]
        )


_INPUTS = {
    Parameter: "parameters",
    Buffer: "buffers",
    Input: "inputs",
    Accumulated: "gradients",
    Saved: "saved",
}


def _waits(node: fx.Node) -> list[fx.Node]:
    """The waits for a collective, none if the node is something else."""
    if collective_of(node) is None:
        return []
    direct = [user for user in node.users if user.target is operator.getitem]
    return [user for n in (node, *direct) for user in n.users if is_wait(user)]


def _rounded(storage: Storage) -> int:
    if storage.device != "cuda":
        return storage.nbytes
    return -(-storage.nbytes // _CUDA_ROUND) * _CUDA_ROUND
