"""`with_strides_of`, `make_viewable`: copies of shards that lie in memory as operators need it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.core.ir.graph import dense_strides, tensors
from autopar.passes.core.node_builder import aten, call
from autopar.passes.rules.emit_redistribute import can_view
from autopar.passes.rules.loops import Operator


def make_viewable(graph: fx.Graph, local: Operator, node: fx.Node) -> Operator:
    """A view of a shard, or of a copy of it if its strides do not allow the view."""
    source, shape, *rest = local.args
    if can_view(tensors(source)[0], shape):
        return local
    contiguous = torch.contiguous_format
    copy = call(graph, node, aten.clone.default, source, memory_format=contiguous)
    copy.meta |= inherited(source, "batch_dims", "placement")
    return replace(local, args=(copy, shape, *rest))


def with_strides_of(
    graph: fx.Graph, whole: torch.Tensor, node: fx.Node, reader: fx.Node
) -> fx.Node:
    """A redistributed value in the memory format of the unsharded tensor.

    Some kernels compute wrong results if the memory formats of their operands differ.
    """
    local = tensors(node)[0]
    wanted = dense_strides(local.shape, whole.stride())
    strides = zip(local.shape, local.stride(), wanted, strict=True)
    if not local.numel() or all(n < 2 or not s or have == s for n, have, s in strides):
        return node  # strides of dims of size 1 and of expanded dims do not matter
    order = sorted(range(local.dim()), key=lambda dim: (-wanted[dim], dim))
    inverse = [order.index(dim) for dim in range(local.dim())]
    contiguous = torch.contiguous_format
    moved = call(graph, reader, aten.permute.default, node, order)
    copy = call(graph, reader, aten.clone.default, moved, memory_format=contiguous)
    result = call(graph, reader, aten.permute.default, copy, inverse)
    if "batch_dims" in node.meta:
        (rows,) = node.meta["batch_dims"]
        moved_rows = tuple(order.index(dim) for dim in rows)
        for new, dims in ((moved, moved_rows), (copy, moved_rows), (result, rows)):
            new.meta["batch_dims"] = (dims,)
    for new in (moved, copy, result):
        new.meta |= inherited(node, "placement")
    return result


def inherited(node: fx.Node, *keys: str) -> dict[str, Any]:
    """Facts about a node that a copy of it keeps."""
    return {key: node.meta[key] for key in keys if key in node.meta}
