"""Memory traffic of small operators under a compiler that fuses them.

A compiler such as inductor writes one kernel for adjacent pointwise and row-wise operators.
Intermediate values never reach memory: a kernel reads each input once and writes each needed result
once. Its time is that of these bytes. A reader and its producer are in one kernel if no path
between them leads through an operator that is not fused.

TorchScript's compiler ("ts") fuses only pointwise operators. Normalisations and softmaxes are
kernels of their own, as with libraries such as apex.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.core.ir.aliases import computes, is_view
from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.messages import is_wait

_ELEMENTWISE = frozenset(
    {
        "native_dropout",
        "native_dropout_backward",
        "gelu_backward",
        "silu_backward",
        "threshold_backward",
        "clone",
        "_to_copy",
        "masked_fill",
        "masked_fill_",
        "div",
        "cat",
        "expand",
    }
)
"""Pointwise operators without torch's tag."""

_BY_ROWS = frozenset(
    {
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "_softmax",
        "_softmax_backward_data",
        "_safe_softmax",
        "_log_softmax",
        "_log_softmax_backward_data",
        "mean",
        "var_mean",
    }
)
"""Row-wise operators."""

EAGER = "eager"
"""The backend without fusion."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a fused kernel moves because of an operator, and whether that is its first."""

    nbytes: int
    first: bool


def is_row_wise(node: fx.Node) -> bool:
    """Whether an operator is a normalisation or a softmax."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in _BY_ROWS


def is_fused(node: fx.Node, backend: str) -> bool:
    """Whether a backend of torch.compile fuses an operator with its neighbours."""
    if node.op != "call_function" or not computes(node):
        return False
    packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if packet in _BY_ROWS:
        return backend != "ts"
    return packet in _ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def traffic(graph: TrainingGraph, backend: str) -> Mapping[fx.Node, Traffic]:
    """The traffic of each fused operator."""
    source = _sources(graph)
    kernel = _kernels(graph, source, backend)
    result: dict[fx.Node, Traffic] = {}
    started: set[int] = set()
    read: set[tuple[int, fx.Node]] = set()
    needed = _needed_outside(graph, source, kernel)
    for node, number in kernel.items():
        nbytes = _written(node) if node in needed else 0
        for value in node.all_input_nodes:
            maker = source[value]
            if kernel.get(maker) != number and (number, maker) not in read:
                read.add((number, maker))
                # A view may be a slice or an expansion of what was written: the smaller is read.
                nbytes += min(_written(value), _written(maker))
        result[node] = Traffic(nbytes, number not in started)
        started.add(number)
    return result


def _sources(graph: TrainingGraph) -> dict[fx.Node, fx.Node]:
    """The node that computed each node's value: views compute nothing."""
    source: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        base = node.args[0] if node.op == "call_function" and node.args else None
        through = is_view(node) and not is_wait(node) and isinstance(base, fx.Node)
        source[node] = source[base] if through else node  # type: ignore[index]
    return source


def _kernels(
    graph: TrainingGraph, source: Mapping[fx.Node, fx.Node], backend: str
) -> dict[fx.Node, int]:
    """The kernel of each fused operator.

    The level of an operator is the longest path to it, counted in operators that are not fused.
    Neighbours of one level can share a kernel, because no path between them leaves it and returns.
    """
    from networkx.utils import UnionFind

    level: dict[fx.Node, int] = {}
    fusible: dict[fx.Node, None] = {}
    merged = UnionFind()

    for node in graph.calls():
        makers = [source[value] for value in node.all_input_nodes if source[value] in level]
        fused = is_fused(node, backend)
        level[node] = max(
            (level[m] + (not (fused and m in fusible and _same_phase(m, node))) for m in makers),
            default=0,
        )
        if fused:
            fusible[node] = None
            for maker in makers:
                if maker in fusible and level[maker] == level[node] and _same_phase(maker, node):
                    merged.union(maker, node)
    numbers: dict[fx.Node, int] = {}
    return {node: numbers.setdefault(merged[node], len(numbers)) for node in fusible}


def _same_phase(one: fx.Node, other: fx.Node) -> bool:
    """Whether two operators both run in the forward, or both in the backward."""
    return bool(one.meta.get("phase") == other.meta.get("phase"))


def _needed_outside(
    graph: TrainingGraph, source: Mapping[fx.Node, fx.Node], kernel: Mapping[fx.Node, int]
) -> set[fx.Node]:
    """Operators whose value is read outside of their kernel."""
    needed: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op != "output" and source[node] is not node:
            continue
        for value in node.all_input_nodes:
            maker = source[value]
            if kernel.get(maker) != kernel.get(node) or node.op == "output":
                needed.add(maker)
    return needed


def _written(node: fx.Node) -> int:
    return sum(map(tensor_bytes, tensors(node)))
