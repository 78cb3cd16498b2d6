"""Chooses the kernels of attention.

Torch runs other operators of attention on each device, so a graph captured on a laptop would not be
that of a GPU. Capture keeps one operator for all devices, and this pass comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.placement import Varying
from autopar.core.operators.attention import attention, attention_backward
from autopar.core.operators.kernels import (
    Kernels,
    Target,
    attention_arguments,
    is_canonical,
    kernels_of,
    tensor_arguments,
)
from autopar.passes.core.node_builder import meta_like
from autopar.passes.core.pass_base import Pass, PassResult

LOGSUMEXP, RNG_STATE = 6, 7  # arguments of the backward


@dataclass(frozen=True)
class LowerAttention(Pass):
    """Replaces `autopar::attention` and its backward by the kernels of the target device.

    Before: one operator on every device. After: the operators that torch's
    `scaled_dot_product_attention` runs there, fused or dense; the backward reads what the kernel of
    its forward left. A backward apart from its forward computes the forward again; with dropout,
    both stay as they are. Tier: exact.

    Attributes:
        target: "cpu" or "cuda"; tensors on a GPU get its kernels anyway.
    """

    target: Target = "cpu"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        if not any(map(is_canonical, graph.calls())):
            return PassResult(graph, "there is no attention")
        graph = graph.copy()
        for forward, backward in list(_pairs(graph)):
            kernels = kernels_of(forward, backward, self.target)
            known: dict[fx.Node, Any] = {}
            if forward is not None:
                _give(kernels, forward, known)
                _write(graph.graph, forward, kernels.forward, known)
            if backward is not None:
                _give(kernels, backward, known)
                early = kernels.forward if forward is None else ()
                _write(graph.graph, backward, (*early, *kernels.backward), known)
            if forward is not None:
                _replace(graph.graph, forward, [known[kernels.out]])
            if backward is not None:
                _replace(graph.graph, backward, [known[node] for node in kernels.gradients])
        _erase(graph.graph)
        return PassResult(graph)


def _pairs(graph: TrainingGraph) -> Iterator[tuple[fx.Node | None, fx.Node | None]]:
    """Attention with its backward; either may be alone, but not with dropout."""
    paired: set[fx.Node] = set()
    for node in graph.calls():
        if node.target is attention:
            readers = {u for item in node.users if item.args[1] for u in item.users}
            backward = next(iter(readers)) if len(readers) == 1 else None
            if backward is not None and _forward_of(backward) is node:
                paired.add(backward)
                yield node, backward
            elif not readers or not _has_dropout(node):
                yield node, None
        elif node.target is attention_backward and node not in paired and not _has_dropout(node):
            yield None, node


def _forward_of(backward: fx.Node) -> fx.Node | None:
    """The forward whose statistics and random state a backward reads."""
    if backward.target is not attention_backward:
        return None
    links = [attention_arguments(backward)[i] for i in (LOGSUMEXP, RNG_STATE)]
    sources = {link.args[0] if link.target is getitem else None for link in links}
    return sources.pop() if len(sources) == 1 else None


def _has_dropout(node: fx.Node) -> bool:
    return bool(attention_arguments(node)[-4])


def _give(kernels: Kernels, node: fx.Node, known: dict[fx.Node, Any]) -> None:
    """Sets the operands of a node for the placeholders of its kernels.

    A backward may have its own copy of an operand, gathered again. It is read if it lies in memory
    like the forward's, for which the kernels were traced.
    """
    *operands, grad = kernels.inputs
    known[grad] = attention_arguments(node)[0]
    for placeholder, operand in zip(operands, tensor_arguments(node), strict=True):
        before = known.setdefault(placeholder, operand)
        if before is not None and tensors(before)[0].stride() == tensors(operand)[0].stride():
            known[placeholder] = operand


def _write(
    graph: fx.Graph, like: fx.Node, nodes: Iterable[fx.Node], known: dict[fx.Node, Any]
) -> None:
    """Copies traced operators to the place of a node, with its phase, block and source."""
    meta = meta_like(like)
    if "placement" in like.meta:
        meta["placement"] = Varying()
    graph.inserting_before(like)
    for node in nodes:
        known[node] = copy = graph.node_copy(node, known.__getitem__)
        copy.meta = {**meta, "val": node.meta["val"]}


def _replace(graph: fx.Graph, node: fx.Node, results: list[fx.Node]) -> None:
    """Gives the readers of a node's results the new ones, which keep the results' meta."""
    for item in list(node.users):
        index: Any = item.args[1]
        if index < len(results):
            new = results[index]
            new.meta |= {k: v for k, v in item.meta.items() if k != "val"}
            item.replace_all_uses_with(new)


def _erase(graph: fx.Graph) -> None:
    """Erases attention that nothing reads any more."""
    for node in reversed(list(graph.nodes)):
        item = node.target is getitem and is_canonical(node.all_input_nodes[0])
        if (item or is_canonical(node)) and not node.users:
            graph.erase_node(node)
