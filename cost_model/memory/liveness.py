"""`memory_spans`: lifetime of each piece of memory of a training step.

A storage lives from the node that allocates it to the last use of any node whose value is in it,
because generated code frees each value after its last use. In addition:

- parameters on storage take no memory;
- other parameters, buffers, constants, optimizer state and the batch always exist;
- gradients live until the optimizer has stepped, the last point of time;
- a stage's outgoing messages live until the end of its forward or backward;
- outputs live until the next forward returns: in `loss = model(x)` the old loss goes last;
- inputs and outputs of a collective live until its wait, unless it works on a copy;
- retained collectives live until later collectives of their axis have ended;
- a kernel's workspace exists while its node runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from autopar.core.ir import roles
from autopar.core.ir.aliases import Storage, find_storages
from autopar.core.ir.graph import TrainingGraph, tensor_bytes
from autopar.core.ir.messages import collective_of, is_stored, is_wait
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory
from autopar.cost_model.memory.workspace import Workspace

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
"""Categories of memory; each byte is in one at any time.

- gradients: returned as a gradient;
- saved: needed by the backward from the forward;
- gathered: whole parameters put together from shards;
- in flight: read or written by a collective that has not ended;
- buckets: other inputs and outputs of collectives, before and after these run;
- buffers: also constants, states of random streams and compression, and cuBLAS's workspace;
- transient: all else, workspaces of kernels and of the optimizer's step included.
"""


@dataclass(frozen=True)
class Overhead:
    """Memory of a step beside the tensors of its graph.

    Attributes:
        optimizer: memory of the optimizer's state and step.
        workspace: memory that kernels allocate for themselves.
        device: "cpu", or the name of the GPU.
        batches: batches of this rank's size that the caller holds: the number of ranks for a
            global batch.
        retained_collectives: collectives of an axis that backend threads may hold after their end.
    """

    optimizer: OptimizerMemory = field(default_factory=OptimizerMemory)
    workspace: Workspace = field(default_factory=Workspace)
    device: str = "cpu"
    batches: int = 1
    retained_collectives: int = 0

    def gaps(self) -> tuple[str, ...]:
        """Notes for a plan on memory that is not counted."""
        if self.workspace.present:
            return ()
        return (
            f"memory: workspaces of kernels are not counted, because no {self.device} is here; the "
            f"optimizer's step is {self.optimizer.provenance}",
        )


@dataclass(frozen=True)
class Span:
    """A piece of memory from its first to its last point of time.

    It starts at ALWAYS if it exists before the step. `flights` has the first and last point of each
    collective that reads or writes it.
    """

    nbytes: int
    start: int
    end: int
    category: str
    flights: tuple[tuple[int, int], ...] = ()


ALWAYS = -1


def memory_spans(graph: TrainingGraph, overhead: Overhead) -> list[Span]:
    """The memory of one step, in the order of allocation.

    Points of time are indices of nodes; the optimizer's step comes after the last node. Memory that
    is not on the device of the parameters is left out.
    """
    lifetimes = _Lifetimes(graph, overhead)
    spans = [
        *lifetimes.tensors(),
        *lifetimes.workspaces(),
        *lifetimes.random_states(),
        *lifetimes.optimizer(),
    ]
    return sorted((span for span in spans if span.nbytes), key=lambda span: span.start)


class _Lifetimes:
    """Lifetimes of the storages of a graph. Points of time are positions of nodes.

    `last` is the optimizer's step, `backward` the first point of the backward. `nodes_of` has the
    nodes whose value is in each storage, `released` when the buffers of retained collectives are
    free.
    """

    def __init__(self, graph: TrainingGraph, overhead: Overhead) -> None:
        self.graph, self.overhead = graph, overhead
        self.nodes = list(graph.graph.nodes)
        self.index = {node: index for index, node in enumerate(self.nodes)}
        self.last = len(self.nodes)
        self.backward = self.index[graph.backward_start]
        self.storages, self.storages_of = find_storages(graph.graph)
        self.nodes_of: list[list[fx.Node]] = [[] for _ in self.storages]
        for node, indices in self.storages_of.items():
            for index in set(indices):
                self.nodes_of[index].append(node)
        self.role = dict(zip(graph.placeholders, graph.inputs, strict=True))
        self.returned: dict[fx.Node, list[roles.OutputRole]] = {}
        for role, result in zip(graph.outputs, graph.results, strict=True):
            if result is not None:
                self.returned.setdefault(result, []).append(role)
        self.released = self._retained() if overhead.retained_collectives else {}
        devices = {storage.device for storage in self.storages}
        self.device = "cuda" if "cuda" in devices else "cpu"

    def tensors(self) -> Iterator[Span]:
        for storage, nodes in zip(self.storages, self.nodes_of, strict=True):
            if self.device == "cuda" and storage.device != "cuda":
                continue
            if is_stored(storage.creator):
                continue
            category = self._category(storage, nodes)
            nbytes = storage.nbytes * (self.overhead.batches if category == "inputs" else 1)
            start, end = self._start(storage), self._end(storage, nodes)
            flights: list[tuple[int, int]] = []
            if start != ALWAYS:
                readers = self._collectives(nodes)
                flights = [(self.index[n], min(self._waited(n), end)) for n in readers]
            yield Span(nbytes, start, end, category, tuple(_merged(flights)))
            if category == "outputs" and start > 0:  # outputs of the previous step
                yield Span(nbytes, 0, self.backward - 1, category)

    def workspaces(self) -> Iterator[Span]:
        for index, node in enumerate(self.nodes):
            if nbytes := self.overhead.workspace.of(node):
                yield Span(nbytes, index, index, "transient")

    def random_states(self) -> Iterator[Span]:
        """Spans of this rank's random state, and of torch's while that is put aside."""
        tags = (getattr(node.target, "tags", ()) for node in self.nodes[: self.backward])
        random = any(torch.Tag.nondeterministic_seeded in node_tags for node_tags in tags)
        several = any(size > 1 for size in self.graph.axes.values())
        if random and several and self.overhead.device == "cpu":
            nbytes = tensor_bytes(torch.get_rng_state())
            yield Span(nbytes, ALWAYS, self.last, "buffers")
            yield Span(nbytes, 0, self.backward - 1, "buffers")

    def optimizer(self) -> Iterator[Span]:
        memory = self.overhead.optimizer
        given = [role for several in self.returned.values() for role in several]
        wanted = {role.of for role in given if isinstance(role, roles.Gradient)}
        trained = [
            self.storages[index].nbytes  # of this rank's shard
            for node, role in self.role.items()
            if isinstance(role, roles.Parameter) and role in wanted
            for index in self.storages_of[node]
        ]
        share = memory.at_once(trained) / sum(trained) if any(trained) else 1.0
        for nbytes in trained:
            for ratio in memory.state:
                yield Span(round(ratio * nbytes), ALWAYS, self.last, "optimizer")
            if memory.counters:
                yield Span(memory.counters, ALWAYS, self.last, "optimizer")
            yield Span(round(memory.every * nbytes * share), self.last, self.last, "transient")
        yield Span(memory.buffers(trained), ALWAYS, self.last, "optimizer")
        yield Span(memory.needed(trained), self.last, self.last, "transient")

    def _start(self, storage: Storage) -> int:
        role = self.role.get(storage.creator)
        if isinstance(role, _PERMANENT) or storage.creator.op == "get_attr":
            return ALWAYS
        if storage.creator.op == "call_function":
            return self.index[storage.creator]
        if isinstance(role, roles.StageInput):
            return self.backward if role.phase == "backward" else 0
        late = isinstance(role, roles.BatchTotal) and role.late
        return self.backward if late or isinstance(role, roles.Tangent) else 0

    def _end(self, storage: Storage, nodes: list[fx.Node]) -> int:
        if (start := self._start(storage)) == ALWAYS:
            return self.last
        released = (self.released.get(node, start) for node in self._collectives(nodes))
        return max([start, *(self._last_use(node) for node in nodes), *released])

    def _retained(self) -> dict[fx.Node, int]:
        """When the buffers of each collective are free: once so many later ones have ended."""
        axes: dict[object, list[fx.Node]] = {}
        for node in self.nodes:
            if collective_of(node) is not None:
                axes.setdefault(node.args[-1], []).append(node)
        count, released = self.overhead.retained_collectives, dict[fx.Node, int]()
        for nodes in axes.values():
            ends = [self._waited(node) for node in nodes]
            # A gloo thread that has carried a collective frees it only when it next gets a core.
            later = [*ends[count:], *[self.last] * count]
            released |= dict(zip(nodes, map(max, ends, later), strict=True))
        return released

    def _waited(self, node: fx.Node) -> int:
        """Point of time of a collective's wait."""
        return max((self.index[wait] for wait in waits_of(node)), default=self.last)

    def _last_use(self, node: fx.Node) -> int:
        """Last point of time at which a node's value is needed."""
        index = self.index[node]
        last = index
        for user in node.users:
            if user.op != "output":
                waits = waits_of(user) if not copies(user) else []
                last = max([last, self.index[user], *(self.index[w] for w in waits)])
            elif not all(isinstance(role, _CONSUMED) for role in self.returned[node]):
                last = self.last
            elif index < self.backward:  # consumed when the forward returns
                last = max(last, self.backward - 1)
        return last

    def _collectives(self, nodes: list[fx.Node]) -> Iterator[fx.Node]:
        """The collectives that read or write a storage with these nodes."""
        readers = {user for node in nodes for user in node.users if not copies(user)}
        return (n for n in readers.union(nodes) if collective_of(n) is not None)

    def _category(self, storage: Storage, nodes: list[fx.Node]) -> str:
        """The category of a storage while no collective uses it."""
        role = self.role.get(storage.creator)
        for kind, name in _INPUTS.items():
            if isinstance(role, kind):
                return name
        given = [role for node in nodes for role in self.returned.get(node, ())]
        users = [user for node in nodes for user in node.users]
        if storage.creator.op == "get_attr":
            return "buffers"
        if any(isinstance(role, (roles.Gradient, roles.UnreducedGrad)) for role in given):
            return "gradients"
        if any(isinstance(role, roles.Output) for role in given):
            return "outputs"
        if any(n.meta.get("gathered") for n in nodes):
            return "gathered"
        if self._start(storage) < self.backward and any(
            user.op != "output" and self.index[user] >= self.backward for user in users
        ):
            return "saved"
        if any(collective_of(n) == "all_gather" for n in nodes):
            return "gathered"
        if any(collective_of(node) for node in (*nodes, *users)):
            return "buckets"
        return "transient"


_c10d = torch.ops._c10d_functional
_COPYING = frozenset(
    {_c10d.all_reduce.default, _c10d.all_reduce_coalesced.default, _c10d.broadcast.default}
)
_PERMANENT = (
    roles.Parameter,
    roles.Buffer,
    roles.State,
    roles.Input,
    roles.BatchFraction,
    roles.BatchIndex,
    roles.UnshardedParam,
)
# Copied, sent or added up at once.
_CONSUMED = (roles.Update, roles.StageOutput, roles.MicrobatchPartial)

_INPUTS = {
    roles.Parameter: "parameters",
    roles.Buffer: "buffers",
    roles.State: "buffers",
    roles.Input: "inputs",
    roles.Accumulated: "gradients",
    roles.Saved: "saved",
    roles.UnshardedParam: "gathered",
}


def copies(node: fx.Node) -> bool:
    """Whether a node is a collective that works on a copy of its input."""
    return node.target in _COPYING


def waits_of(node: fx.Node) -> list[fx.Node]:
    """The waits for a collective; none for other nodes."""
    if collective_of(node) is None:
        return []
    elements = [user for user in node.users if user.target is operator.getitem]
    return [user for n in (node, *elements) for user in n.users if is_wait(user)]


def _merged(windows: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Windows of time, with those that overlap merged."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(windows):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
