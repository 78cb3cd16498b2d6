"""`own_gradients`: a backward whose gradients share memory with nothing else.

Whoever accumulates gradients adds to them in place: autograd to `.grad`, `no_sync` to what it
holds back, a pipeline to those of earlier micro-batches. The parameters of `a + b` have one tensor
as their gradients, and that of the whole sum is the gradient that the loop gave.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Gradient, OutputRole, UnreducedGrad
from autopar.passes.core.node_builder import aten, call, is_view, storage_owner, viewed

Span = tuple[int, int]
"""First element of a tensor in its storage, and the one after the last."""


def own_gradients(backward: TrainingGraph) -> TrainingGraph:
    """Copies each gradient that is an input, or overlaps with another in memory.

    Before: a lowered backward. After: the same values. Slices of a bucket stay slices.
    """
    graph = backward.copy()
    taken: dict[fx.Node, list[Span]] = {}
    changed: dict[OutputRole, fx.Node | None] = {}
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if node is None or not isinstance(role, (Gradient, UnreducedGrad)):
            continue
        owner, span = _place(node)
        spans = taken.setdefault(owner, [])
        if owner.op == "call_function" and not any(_overlap(span, other) for other in spans):
            spans.append(span)
            continue
        graph.graph.inserting_before(node.next if node.op == "call_function" else _first(graph))
        changed[role] = call(graph.graph, node, aten.clone.default, node)
        changed[role].meta["phase"] = "backward"  # type: ignore[union-attr]
    return graph.with_results(changed)


def _place(node: fx.Node) -> tuple[fx.Node, Span]:
    """The node that allocated a value's memory, or the last one that views do not lead from."""
    source, chain = node, list[fx.Node]()
    while is_view(source) and isinstance(source.meta["val"], torch.Tensor):
        chain.insert(0, source)
        source = source.all_input_nodes[0]
    if storage_owner(source).op != "call_function":
        return storage_owner(source), (0, 0)
    return source, _span(viewed(source.meta["val"], source, chain))


def _span(tensor: torch.Tensor) -> Span:
    begin = int(tensor.storage_offset())
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return begin, begin + 1 + sum((size - 1) * stride for size, stride in pairs)


def _overlap(one: Span, other: Span) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def _first(graph: TrainingGraph) -> fx.Node:
    """The first node after the inputs."""
    return next(node for node in graph.graph.nodes if node.op != "placeholder")
