"""The collectives that passes write: abstract until `lower_collectives` turns them into torch's.

Each takes a list of tensors, so that merging two is joining their lists. A `start_*` issues
the collective, `wait` yields its results; what stands between them can overlap.

| collective | takes | yields |
|---|---|---|
| `start_all_reduce` | Partial | Replicate |
| `start_reduce_scatter` | Partial | Shard(0) |
| `start_all_gather` | Shard(0) | Replicate |
| `start_all_to_all` | dim 0 cut for the ranks | dim 0 by the rank it came from |
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import fx

from autopar._torch import FakeTensor
from autopar.errors import PassError
from autopar.ir.graph import TrainingGraph, Value, tensor_bytes, tensors
from autopar.passes.core.node_builder import call


def start_all_reduce(
    tensors: Sequence[torch.Tensor], axis: str, op: str = "sum"
) -> list[torch.Tensor]:
    """Reduces each tensor by `op`, "sum" or "max", over the ranks of `axis`."""
    _abstract(tensors)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def start_reduce_scatter(
    tensors: Sequence[torch.Tensor], rows: Sequence[int], axis: str
) -> list[torch.Tensor]:
    """Sums each tensor over the ranks of `axis`; this rank keeps its `rows` of dim 0."""
    _abstract(tensors)
    return [t.new_empty((n, *t.shape[1:])) for t, n in zip(tensors, rows, strict=True)]


def start_all_gather(
    tensors: Sequence[torch.Tensor], rows: Sequence[int], axis: str
) -> list[torch.Tensor]:
    """Joins every rank's chunk of dim 0 into tensors of `rows` rows."""
    _abstract(tensors)
    return [t.new_empty((n, *t.shape[1:])) for t, n in zip(tensors, rows, strict=True)]


def start_all_to_all(tensors: Sequence[torch.Tensor], axis: str) -> list[torch.Tensor]:
    """Cuts dim 0 of each tensor into a chunk for every rank; yields the chunks from every rank."""
    _abstract(tensors)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]


def wait(pending: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a started collective."""
    _abstract(pending)
    return list(pending)


STARTS = (start_all_reduce, start_reduce_scatter, start_all_gather, start_all_to_all)


def _abstract(tensors: Sequence[torch.Tensor]) -> None:
    if not all(isinstance(t, FakeTensor) for t in tensors):
        raise PassError("an abstract collective was run: lower_collectives has to come before")


def starts(graph: TrainingGraph) -> Iterator[fx.Node]:
    """The collectives of a graph, in order."""
    return (node for node in graph.graph.nodes if node.target in STARTS)


def axis_of(start: fx.Node) -> str:
    """The mesh axis of a started collective."""
    sized = start.target in (start_reduce_scatter, start_all_gather)
    return str(start.args[2 if sized else 1])


def op_of(start: fx.Node) -> str:
    """By what a started collective reduces."""
    given = start.args[2] if start.target is start_all_reduce and len(start.args) > 2 else "sum"
    return str(start.kwargs.get("op", given))


def message_bytes(start: fx.Node) -> int:
    """The size of a collective's message, as `cost_model.collectives` means it."""
    given: list[fx.Node] = start.args[0]  # type: ignore[assignment]
    sizes = [sum(map(tensor_bytes, own)) for own in (chain(*map(tensors, given)), tensors(start))]
    return max(sizes)


def kind_of(start: fx.Node) -> str:
    """The name of the started collective, as in `cost_model.collectives`."""
    return str(start.target.__name__).removeprefix("start_")  # type: ignore[union-attr]


def wait_of(start: fx.Node) -> fx.Node:
    """The wait of a started collective."""
    return next(iter(start.users))


def value_of(node: fx.Node) -> Value:
    """The tensor that a node stands for: what names it belongs to what made it."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, place = node.args
        made = source.args[0] if source.target is wait else source  # type: ignore[union-attr]
        return Value(made, place)  # type: ignore[arg-type]
    return Value(node)


def is_name(node: fx.Node) -> bool:
    """Whether a node computes nothing: an element of a tuple, or the wait for a collective."""
    return node.target in (operator.getitem, wait)


def results_of(start: fx.Node) -> list[fx.Node | None]:
    """The nodes that stand for each result of a collective; None where it is not used."""
    found: list[fx.Node | None] = [None] * len(start.args[0])  # type: ignore[arg-type]
    for item in wait_of(start).users:
        found[item.args[1]] = item  # type: ignore[index]
    return found


def tagged(start: fx.Node, tag: str) -> list[str]:
    """Meta entries of the results of a collective under a key."""
    return [r.meta[tag] for r in results_of(start) if r is not None and tag in r.meta]


def collective(
    graph: fx.Graph, like: fx.Node, start: object, tensors: Sequence[fx.Node], *options: object
) -> list[fx.Node]:
    """Writes a collective, its wait and its results at the insertion point."""
    pending = call(graph, like, start, list(tensors), *options)  # type: ignore[arg-type]
    done = call(graph, like, wait, pending)
    return [call(graph, like, operator.getitem, done, i) for i in range(len(tensors))]


def replace_collective(graph: fx.Graph, start: fx.Node, results: Sequence[fx.Node]) -> None:
    """Puts other nodes in the place of a collective's results; what these were, the others are."""
    done = wait_of(start)
    for before, after in zip(results_of(start), results, strict=True):
        if before is not None:
            after.meta |= {key: before.meta[key] for key in TAGS if key in before.meta}
            before.replace_all_uses_with(after)
            graph.erase_node(before)
    graph.erase_node(done)
    graph.erase_node(start)


TAGS = ("gathered", "gradient", "placement", "batch_dims")
"""In the meta of a collective's result: what it stands for, and how it lies."""
