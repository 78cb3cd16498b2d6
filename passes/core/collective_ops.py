"""Abstract collectives, which passes write and `lower_collectives` lowers to PyTorch's.

A `start_*` op issues a collective and `wait` returns its results. Nodes between the two overlap
with the collective. A collective takes a list of tensors; passes merge two by joining the lists.

| collective | operand | result |
|---|---|---|
| `start_all_reduce` | Partial | Replicate |
| `start_reduce_scatter` | Partial | Shard(0) |
| `start_all_gather` | Shard(0) | Replicate |
| `start_all_to_all` | dim 0 by receiving rank | dim 0 by sending rank |
| `start_permute` | one rank's part | another rank's part |
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import fx

from autopar._torch import FakeTensor
from autopar.core.ir.graph import TrainingGraph, Value, tensor_bytes, tensors
from autopar.errors import PassError
from autopar.passes.core.node_builder import call

WAIT_LOWERED = torch.ops._c10d_functional.wait_tensor.default
"""The wait of a functional collective, to which abstract ones are lowered."""


def is_lowered_start(node: fx.Node) -> bool:
    """Whether a node issues a functional collective."""
    issued = str(node.target).startswith("_c10d_functional.")
    return node.op == "call_function" and issued and node.target is not WAIT_LOWERED


def start_all_reduce(
    tensors: Sequence[torch.Tensor], axis: str, op: str = "sum"
) -> list[torch.Tensor]:
    """Reduces each tensor by `op` ("sum" or "max") over the ranks of `axis`."""
    contiguous = torch.contiguous_format
    return [torch.empty_like(t, memory_format=contiguous) for t in _fakes(tensors)]


def start_reduce_scatter(
    tensors: Sequence[torch.Tensor], rows: Sequence[int], axis: str
) -> list[torch.Tensor]:
    """Sums each tensor over the ranks of `axis`; this rank keeps its `rows` of dim 0."""
    return [t.new_empty((n, *t.shape[1:])) for t, n in zip(_fakes(tensors), rows, strict=True)]


def start_all_gather(
    tensors: Sequence[torch.Tensor], rows: Sequence[int], axis: str
) -> list[torch.Tensor]:
    """Concatenates the chunks of all ranks along dim 0 to tensors of `rows` rows."""
    return [t.new_empty((n, *t.shape[1:])) for t, n in zip(_fakes(tensors), rows, strict=True)]


def start_all_to_all(
    tensors: Sequence[torch.Tensor],
    axis: str,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Sends one chunk of dim 0 to each rank; concatenates the received chunks along dim 0.

    Chunks are even, or have the numbers of rows that `sent` and `received` say for each rank.
    """
    if received is None:
        return start_all_reduce(tensors, axis)
    return [t.new_empty((sum(received), *t.shape[1:])) for t in _fakes(tensors)]


def start_permute(
    tensors: Sequence[torch.Tensor], targets: Sequence[int], axis: str
) -> list[torch.Tensor]:
    """Sends the tensors of rank r of `axis` to rank `targets[r]`, which gets them from r alone."""
    return start_all_reduce(tensors, axis)


def wait(pending: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Waits for a started collective and returns its results."""
    return _fakes(pending)


STARTS = (
    start_all_reduce,
    start_reduce_scatter,
    start_all_gather,
    start_all_to_all,
    start_permute,
)

FUNCTIONS = (operator.getitem, wait, *STARTS)
"""All functions that graphs call besides operators of torch."""


def _fakes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not all(isinstance(t, FakeTensor) for t in tensors):
        raise PassError("an abstract collective was run: lower_collectives has to come before")
    return list(tensors)


def starts(graph: TrainingGraph) -> Iterator[fx.Node]:
    """Starts of the collectives of a graph, in order."""
    return (node for node in graph.graph.nodes if node.target in STARTS)


def is_uneven(start: fx.Node) -> bool:
    """Whether a start is of an all-to-all whose chunks have sizes of their own."""
    return start.target is start_all_to_all and len(start.args) > 2


def axis_of(start: fx.Node) -> str:
    """Mesh axis of a started collective."""
    follows = start.target in (start_reduce_scatter, start_all_gather, start_permute)
    return str(start.args[2 if follows else 1])


def op_of(start: fx.Node) -> str:
    """Reduction of a started collective: "sum" or "max"."""
    given = start.args[2] if start.target is start_all_reduce and len(start.args) > 2 else "sum"
    return str(start.kwargs.get("op", given))


def message_bytes(start: fx.Node) -> int:
    """Message size in bytes, as `cost_model.collectives` defines it."""
    given: list[fx.Node] = start.args[0]  # type: ignore[assignment]
    sizes = [sum(map(tensor_bytes, own)) for own in (chain(*map(tensors, given)), tensors(start))]
    return max(sizes)


def kind_of(start: fx.Node) -> str:
    """Name of a started collective, as in `cost_model.collectives`."""
    return str(start.target.__name__).removeprefix("start_")  # type: ignore[union-attr]


def wait_of(start: fx.Node) -> fx.Node:
    """Wait of a started collective."""
    return next(iter(start.users))


def value_of(node: fx.Node) -> Value:
    """Value of a node; a getitem resolves to the producer of its tuple and the index."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, place = node.args
        made = source.args[0] if source.target is wait else source  # type: ignore[union-attr]
        return Value(made, place)  # type: ignore[arg-type]
    return Value(node)


def is_name(node: fx.Node) -> bool:
    """Whether a node computes nothing: a getitem or a wait."""
    return node.target in (operator.getitem, wait)


def results_of(start: fx.Node) -> list[fx.Node | None]:
    """Node of each result of a collective; None for unused results."""
    found: list[fx.Node | None] = [None] * len(start.args[0])  # type: ignore[arg-type]
    for item in wait_of(start).users:
        found[item.args[1]] = item  # type: ignore[index]
    return found


def tagged(start: fx.Node, tag: str) -> list[str]:
    """Values of the meta key `tag` among the results of a collective."""
    return [r.meta[tag] for r in results_of(start) if r is not None and tag in r.meta]


def collective(
    graph: fx.Graph, like: fx.Node, start: object, tensors: Sequence[fx.Node], *options: object
) -> list[fx.Node]:
    """Writes a collective, its wait and its results at the insertion point."""
    pending = call(graph, like, start, list(tensors), *options)  # type: ignore[arg-type]
    done = call(graph, like, wait, pending)
    return [call(graph, like, operator.getitem, done, i) for i in range(len(tensors))]


def annotate(results: Sequence[fx.Node], **meta: object) -> None:
    """Adds metadata to the start, the wait and the results of a written collective."""
    done = results[0].all_input_nodes[0]
    for node in (*done.all_input_nodes, done, *results):
        node.meta |= meta


def replace_collective(graph: fx.Graph, start: fx.Node, results: Sequence[fx.Node]) -> None:
    """Replaces a collective by the nodes `results`, which inherit its results' `TAGS`.

    Raises:
        PassError: a new node is an input of the collective, which would be lost.
    """
    if lost := set(results) & set(start.all_input_nodes):
        raise PassError(
            f"{sorted(map(str, lost))} are inputs of {start}, not results of a collective in its "
            "place; without one the ranks differ"
        )
    done = wait_of(start)
    for before, after in zip(results_of(start), results, strict=True):
        if before is not None:
            after.meta |= {key: before.meta[key] for key in TAGS if key in before.meta}
            before.replace_all_uses_with(after)
            graph.erase_node(before)
    graph.erase_node(done)
    graph.erase_node(start)


TAGS = ("gathered", "gradient", "placement", "batch_dims")
"""Meta keys that nodes inherit from the collective's results that they replace."""
