"""`CastBeforeGather`: parameters cast to the dtype of their uses before they are gathered.

Autocast casts a parameter where it is used, so that ZeRO would gather it in float32. In bf16, a
gather sends and holds half of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.passes.core.collective_ops import (
    annotate,
    collective,
    replace_collective,
    results_of,
    start_all_gather,
    starts,
    tagged,
)
from autopar.passes.core.node_builder import aten, call, is_view, result_of, value
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class CastBeforeGather(Pass):
    """Casts the shard of a parameter before its gather where all uses are the same cast.

    Before: a gather sends a parameter as stored, and autocast casts the gathered one. After: each
    rank casts its shard, and the gather sends the smaller dtype. A cast rounds each element alone,
    so the values are equal bit for bit. A parameter that is also used as stored, or cast to two
    dtypes, is gathered as stored. Tier: exact.
    """

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph, done = graph.copy(), False
        for start in reversed(list(starts(graph))):  # along two axes, the later gather first
            if start.target is start_all_gather and tagged(start, "gathered"):
                done |= _cast_first(graph.graph, start)
        return PassResult(graph, "" if done else "no gathered parameter is always cast")


def _cast_first(graph: fx.Graph, start: fx.Node) -> bool:
    """Casts the operand of a gather instead of its result; whether that is possible."""
    (gathered,) = results_of(start)
    assert gathered is not None
    found = _casts(gathered)
    if found is None:
        return False
    casts, views = found
    (shard,) = start.all_input_nodes
    graph.inserting_before(start)
    dtype = tensors(casts[0])[0].dtype
    cast = call(graph, start, aten._to_copy.default, shard, dtype=dtype)
    results = collective(graph, start, start_all_gather, [cast], *start.args[1:])
    if "placement" in shard.meta:  # there are several ranks of the data
        cast.meta["placement"] = shard.meta["placement"]
        annotate(results, placement=gathered.meta["placement"])
    for node in casts:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    replace_collective(graph, start, results)
    for view in views:
        view.meta["val"] = result_of(view.target, value(view.args), value(view.kwargs))  # type: ignore[arg-type]
    return True


def _casts(gathered: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """The casts of a gathered parameter and the views before them; None if it has other uses.

    The casts have one dtype, smaller than the parameter's, and keep strides.
    """
    casts: list[fx.Node] = []
    views: list[fx.Node] = []
    pending = [gathered]
    while pending:
        node = pending.pop()
        for user in node.users:
            if _is_cast(user):
                casts.append(user)
            elif _is_view_or_copy(user) and _dtype(user) == _dtype(gathered):
                views.append(user)
                pending.append(user)
            else:
                return None
    dtypes = {_dtype(node) for node in casts}
    if len(dtypes) != 1 or any(map(_is_returned, casts)):
        return None
    (dtype,) = dtypes
    smaller = dtype is not None and dtype.itemsize < tensors(gathered)[0].itemsize
    return (casts, views) if smaller else None


def _is_view_or_copy(node: fx.Node) -> bool:
    """Whether a node changes no value: a view, or the copy that puts a sharded dim in place."""
    return is_view(node) or node.target is aten.transpose_copy.int


def _is_cast(node: fx.Node) -> bool:
    """Whether a node only changes the dtype of its operand."""
    if node.target is not aten._to_copy.default:
        return False
    (before,), (after,) = tensors(node.all_input_nodes[0]), tensors(node)
    return before.device == after.device and before.stride() == after.stride()


def _is_returned(node: fx.Node) -> bool:
    """Whether the caller gets a node or a view of it, which it may change in place."""
    return any(u.op == "output" or (is_view(u) and _is_returned(u)) for u in node.users)


def _dtype(node: fx.Node) -> torch.dtype | None:
    """Dtype of a node's only tensor, None for several."""
    val = node.meta["val"]
    return val.dtype if isinstance(val, torch.Tensor) else None
