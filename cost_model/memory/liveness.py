"""`memory_spans`: from when to when each piece of memory of a training step exists.

A storage lives from the node that allocates it to the last use of any node whose value lies in
it, as the generated code frees each value behind its last use. Beyond that:

- parameters, buffers, constants and optimizer state always exist, and so does the batch, which
  the caller holds;
- gradients live until the optimizer has stepped, which is the last point of time;
- what a stage sends on goes when its half has run;
- outputs are held by the caller until the next forward returns other ones: in `loss = model(x)`
  the old loss goes when the new one is there;
- what a collective reads or writes is held until it has been waited for, unless it makes a copy;
  where it lingers, until the threads that carry messages must have turned to others;
- what a kernel allocates for itself exists while its node runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.cost_model.collectives import collective_of, is_wait
from autopar.cost_model.kernels.aliases import Storage, find_storages
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory
from autopar.cost_model.memory.workspace import Workspace
from autopar.ir.graph import TrainingGraph, tensor_bytes
from autopar.ir.roles import (
    Accumulated,
    BatchChecksum,
    BatchFraction,
    BatchIndex,
    BatchTotal,
    Buffer,
    ChecksumSum,
    Gradient,
    Input,
    InputRole,
    MicrobatchPartial,
    Output,
    OutputRole,
    Parameter,
    Saved,
    StageInput,
    StageOutput,
    State,
    Tangent,
    UnreducedGrad,
    UnshardedParam,
    Update,
)

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "saved",
    "transient",
    "gathered",
    "buckets",
    "in flight",
    "buffers",
    "inputs",
    "outputs",
)
"""Each byte is in one at any time: in gradients if it will be returned as one; in gathered if it
is a whole parameter put together from shards; in flight while a collective under way reads or
writes it, and before and after that in buckets, if it is nothing of the other kinds; in saved if
the backward needs it from the forward; constants of the model, states of random streams and of
compression, and cuBLAS's workspace are in buffers; all else, scratch of kernels and of the
optimizer's step included, is transient."""


@dataclass(frozen=True)
class Overhead:
    """What a step allocates beside the tensors of its graph.

    Attributes:
        optimizer: the optimizer's state, and what its step needs.
        scratch: what kernels need.
        device: "cpu", or the name of the GPU.
        batches: how many times this rank's rows the caller holds: the number of ranks if each is
            given the global batch.
        lingering: how many collectives of an axis may be held beyond their end, by threads that
            carried them and have not got a core since to let go of them.
    """

    optimizer: OptimizerMemory = field(default_factory=OptimizerMemory)
    workspace: Workspace = field(default_factory=Workspace)
    device: str = "cpu"
    batches: int = 1
    retained_collectives: int = 0

    def gaps(self) -> tuple[str, ...]:
        """What is not known of it, for the notes of a plan."""
        if self.workspace.present:
            return ()
        return (
            f"memory: what kernels on {self.device} allocate for themselves is not in it, as there "
            f"is none here; the optimizer's step is {self.optimizer.provenance}",
        )


@dataclass(frozen=True)
class Span:
    """A piece of memory.

    Attributes:
        nbytes: its size.
        start: the first point of time at which it exists; -1 if it does always.
        end: the last one.
        category: one of CATEGORIES.
        flights: the first and last point of each collective that reads or writes it.
    """

    nbytes: int
    start: int
    end: int
    category: str
    flights: tuple[tuple[int, int], ...] = ()


ALWAYS = -1


def memory_spans(graph: TrainingGraph, overhead: Overhead) -> list[Span]:
    """The memory of one step, in the order in which it is allocated.

    Time is counted in nodes of the graph; the optimizer's step comes behind the last one.
    Memory that is not on the device of the parameters is left out.
    """
    life = _Life(graph, overhead)
    found = [*life.tensors(), *life.workspace(), *life.randomness(), *life.update()]
    return sorted((span for span in found if span.nbytes), key=lambda span: span.start)


class _Life:
    """Who makes, holds and uses each storage of a graph.

    Attributes:
        nodes: all nodes in order; `at` is the index of each.
        last: the point of time of the optimizer's step.
        released: for each collective that lingers, when the last thread has let go of it.
        backward: that of the first node of the backward.
        storages: all storages; `holders` the nodes whose value lies in each.
    """

    def __init__(self, graph: TrainingGraph, overhead: Overhead) -> None:
        self.graph, self.overhead = graph, overhead
        self.nodes = list(graph.graph.nodes)
        self.at = {node: index for index, node in enumerate(self.nodes)}
        self.last = len(self.nodes)
        self.backward = self.at[graph.backward_start]
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
        self.released = self.retained_collectives() if overhead.retained_collectives else {}
        devices = {storage.device for storage in self.storages}
        self.device = "cuda" if "cuda" in devices else "cpu"

    # What exists.

    def tensors(self) -> Iterator[Span]:
        """The tensors of the graph."""
        for storage, holders in zip(self.storages, self.holders, strict=True):
            if self.device == "cuda" and storage.device != "cuda":
                continue
            category = self.category(storage, holders)
            nbytes = storage.nbytes
            if category == "inputs":
                nbytes *= self.overhead.batches
            start, end = self.start(storage), self.end(storage, holders)
            flights = () if start == ALWAYS else tuple(_merged(self.flights(holders, end)))
            yield Span(nbytes, start, end, category, flights)
            if category == "outputs" and start > 0:  # those of the step before
                yield Span(nbytes, 0, self.backward - 1, category)

    def workspace(self) -> Iterator[Span]:
        """What kernels allocate for themselves."""
        for index, node in enumerate(self.nodes):
            if nbytes := self.overhead.workspace.of(node):
                yield Span(nbytes, index, index, "transient")

    def randomness(self) -> Iterator[Span]:
        """The state of this rank's own random stream, and torch's while it is put aside."""
        tags = (getattr(node.target, "tags", ()) for node in self.nodes[: self.backward])
        random = any(torch.Tag.nondeterministic_seeded in own for own in tags)
        several = any(size > 1 for size in self.graph.axes.values())
        if random and several and self.overhead.device == "cpu":
            nbytes = tensor_bytes(torch.get_rng_state())
            yield Span(nbytes, ALWAYS, self.last, "buffers")
            yield Span(nbytes, 0, self.backward - 1, "buffers")

    def update(self) -> Iterator[Span]:
        """The optimizer's state, and what its step allocates."""
        optimizer, trained = self.overhead.optimizer, self.trained()
        for nbytes in trained:
            for ratio in optimizer.state:
                yield Span(round(ratio * nbytes), ALWAYS, self.last, "optimizer")
            if optimizer.counters:
                yield Span(optimizer.counters, ALWAYS, self.last, "optimizer")
            yield Span(round(optimizer.every * nbytes), self.last, self.last, "transient")
        yield Span(optimizer.needed(trained), self.last, self.last, "transient")

    def trained(self) -> list[int]:
        """Bytes of this rank's part of each parameter that has a gradient."""
        gradients = {
            role.of for roles in self.returned.values() for role in roles
            if isinstance(role, Gradient)
        }  # fmt: skip
        return [
            self.storages[index].nbytes
            for node, role in self.role.items()
            if role in gradients and isinstance(role, Parameter)
            for index in self.behind[node]
        ]

    # From when to when.

    def start(self, storage: Storage) -> int:
        """The first point of time at which a storage exists."""
        role = self.role.get(storage.creator)
        if isinstance(role, _STANDING) or storage.creator.op == "get_attr":
            return ALWAYS
        if storage.creator.op == "call_function":
            return self.at[storage.creator]
        return self.backward if _is_late(role) else 0

    def end(self, storage: Storage, holders: list[fx.Node]) -> int:
        """The last point of time at which a storage exists."""
        if (start := self.start(storage)) == ALWAYS:
            return self.last
        gone = max(start, *(self.let_go(node) for node in holders))
        if not self.released:
            return gone
        return max([gone, *(self.released[node] for node in self.carried(holders))])

    def retained_collectives(self) -> dict[fx.Node, int]:
        """When those that carry the collectives of an axis have ended so many behind each."""
        axes: dict[object, list[fx.Node]] = {}
        for node in self.nodes:
            if collective_of(node) is not None:
                axes.setdefault(node.args[-1], []).append(node)
        count, found = self.overhead.retained_collectives, dict[fx.Node, int]()
        for nodes in axes.values():
            ends = [self.ended(node) for node in nodes]
            later = [*ends[count:], *[self.last] * count]
            found |= dict(zip(nodes, map(max, ends, later), strict=True))
        return found

    def ended(self, node: fx.Node) -> int:
        """When a collective has been waited for."""
        return max((self.at[wait] for wait in waits_of(node)), default=self.last)

    def let_go(self, node: fx.Node) -> int:
        """The last point of time at which this node's value is needed."""
        index = self.at[node]
        last = index
        for user in node.users:
            if user.op != "output":
                waits = waits_of(user) if not copies(user) else []
                last = max([last, self.at[user], *(self.at[w] for w in waits)])
            elif not all(isinstance(role, _TAKEN) for role in self.returned[node]):
                last = self.last
            elif index < self.backward:  # taken when the forward returns
                last = max(last, self.backward - 1)
        return last

    def flights(self, holders: list[fx.Node], end: int) -> Iterator[tuple[int, int]]:
        """From when to when collectives under way read or write a storage that ends at `end`."""
        for node in self.carried(holders):
            yield self.at[node], min(self.ended(node), end)

    def carried(self, holders: list[fx.Node]) -> Iterator[fx.Node]:
        """The collectives that read or write a storage."""
        readers = {user for holder in holders for user in holder.users if not copies(user)}
        return (n for n in readers.union(holders) if collective_of(n) is not None)

    # What kind.

    def category(self, storage: Storage, holders: list[fx.Node]) -> str:
        """The one of CATEGORIES that a storage belongs to while no collective uses it."""
        role = self.role.get(storage.creator)
        for kind, name in _INPUTS.items():
            if isinstance(role, kind):
                return name
        roles = [role for node in holders for role in self.returned.get(node, ())]
        users = [user for node in holders for user in node.users]
        if storage.creator.op == "get_attr":
            return "buffers"
        if any(isinstance(role, (Gradient, UnreducedGrad)) for role in roles):
            return "gradients"
        if any(isinstance(role, (Output, ChecksumSum)) for role in roles):
            return "outputs"
        if any(n.meta.get("gathered") for n in holders):
            return "gathered"
        if self.start(storage) < self.backward and any(
            user.op != "output" and self.at[user] >= self.backward for user in users
        ):
            return "saved"
        if any(collective_of(n) == "all_gather" for n in holders):
            return "gathered"
        if any(collective_of(node) for node in (*holders, *users)):
            return "buckets"
        return "transient"


_c10d = torch.ops._c10d_functional
_COPYING = frozenset(
    {_c10d.all_reduce.default, _c10d.all_reduce_coalesced.default, _c10d.broadcast.default}
)
_STANDING = (
    Parameter,
    Buffer,
    State,
    Input,
    BatchFraction,
    BatchIndex,
    BatchChecksum,
    UnshardedParam,
)
_TAKEN = (Update, StageOutput, MicrobatchPartial)  # copied, sent or added up at once

_INPUTS = {
    Parameter: "parameters",
    Buffer: "buffers",
    State: "buffers",
    Input: "inputs",
    Accumulated: "gradients",
    Saved: "saved",
    UnshardedParam: "gathered",
}


def _is_late(role: InputRole | None) -> bool:
    """Whether an input comes with the backward."""
    if isinstance(role, StageInput):
        return role.phase == "backward"
    return isinstance(role, Tangent) or (isinstance(role, BatchTotal) and role.late)


def copies(node: fx.Node) -> bool:
    """Whether a node is a collective that works on a copy of what it is given, made at once."""
    return node.target in _COPYING


def waits_of(node: fx.Node) -> list[fx.Node]:
    """The waits for a collective, none if the node is something else."""
    if collective_of(node) is None:
        return []
    direct = [user for user in node.users if user.target is operator.getitem]
    return [user for n in (node, *direct) for user in n.users if is_wait(user)]


def _merged(windows: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows of time, those that touch joined."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found
