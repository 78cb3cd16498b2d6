"""`fold_views`: fewer views for the same values, before code is generated."""

from __future__ import annotations

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Output, OutputRole
from autopar.passes.core.node_builder import aten, is_view, viewed

RESHAPES = (aten.view.default, aten._unsafe_view.default)


def fold_views(graph: TrainingGraph) -> TrainingGraph:
    """Reads a value instead of a view that is identical to it, and joins successive reshapes.

    Sums to a vector keep no summed dims. Before: any graph. After: the same values and storages.
    Outputs of the model stay, since autograd needs a tensor for each.
    """
    graph = graph.copy()
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.calls():
        if not _is_single_view(node):
            continue
        source = node.all_input_nodes[0]
        if node.target in RESHAPES and source.target in RESHAPES:
            node.replace_input_with(source, source.all_input_nodes[0])
        if (found := _vector_sum(node) or _identical(node)) is not None:
            same[node] = found
            for user in [u for u in node.users if u is not graph.output_node]:
                user.replace_input_with(node, found)
    results: dict[OutputRole, fx.Node | None] = {
        role: same[node]
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if node in same and not isinstance(role, Output)
    }
    graph = graph.with_results(results)
    for node in reversed(graph.graph.nodes):
        if _is_single_view(node) and not node.users:
            graph.graph.erase_node(node)
    return graph


def _is_single_view(node: fx.Node) -> bool:
    return is_view(node) and isinstance(node.meta["val"], torch.Tensor)


def _identical(node: fx.Node) -> fx.Node | None:
    """The nearest value among those that a view is of with the same elements in the same order.

    Views do not depend on strides. So equal elements at equal addresses of the fake tensors show
    that a chain of views is the identity, whatever strides a kernel gives its result. The chain
    runs on the fake value itself: the fake view may be of another that a pass has replaced.
    """
    view, source, chain = node.meta["val"], node, list[fx.Node]()
    while _is_single_view(source):
        chain.insert(0, source)
        source = source.all_input_nodes[0]
        value = source.meta["val"]
        if not isinstance(value, torch.Tensor):
            return None
        # Expanded dims give several elements one address, so equal addresses would prove nothing.
        alike = _layout(view) == _layout(value) and _has_distinct_elements(value)
        if alike and _layout(viewed(value, source, chain)) == _layout(value):
            return source
    return None


def _vector_sum(node: fx.Node) -> fx.Node | None:
    """The sum that a view takes the summed dims from; sums to the vector itself from now on."""
    total = node.all_input_nodes[0]
    if node.target not in RESHAPES or total.target is not aten.sum.dim_IntList:
        return None
    if len(total.users) > 1 or total.kwargs or total.args[2:] != (True,):
        return None
    dims = {dim % total.meta["val"].dim() for dim in total.args[1]}  # type: ignore[union-attr]
    kept = [size for dim, size in enumerate(total.meta["val"].shape) if dim not in dims]
    if len(kept) != 1 or list(node.meta["val"].shape) != kept:
        return None
    total.args = total.args[:2]
    total.meta |= {"val": node.meta["val"]}
    return total


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    strides = [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    # A lazy conjugate or negation has the layout of its source, but other values.
    bits = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return tuple(tensor.shape), strides, tensor.storage_offset(), bits


def _has_distinct_elements(tensor: torch.Tensor) -> bool:
    """Whether no two elements have the same address; expanded dims do."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return False
        span = max(span, stride * size)
    return True
