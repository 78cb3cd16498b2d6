"""What a compiler that fuses leaves of the memory traffic of a graph's small operators.

A compiler such as inductor writes one kernel for operators that work element by element, or row by
row, and stand next to each other. What is made and read inside of a kernel never reaches memory;
what enters is read once, what others need is written once. So a kernel's time is that of the bytes
that cross its border. Two operators of which one reads the other are one kernel where no path
between them leads through an operator that is not fused.

TorchScript's compiler ("ts") fuses what works element by element alone; normalisations and
softmaxes are kernels of their own, as where libraries such as apex bring them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.cost_model.collectives import collective_of, is_wait
from autopar.cost_model.kernels.aliases import is_view
from autopar.ir.graph import TrainingGraph, tensor_bytes, tensors

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
"""Operators that work element by element, beside those that torch tags as pointwise."""

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
"""Operators that work row by row."""

EAGER = "eager"
"""The backend under which no operator is fused with another."""


@dataclass(frozen=True)
class Traffic:
    """What an operator inside of a kernel costs.

    Attributes:
        nbytes: that cross the border of the kernel because of it.
        first: whether the kernel starts with it.
    """

    nbytes: int
    first: bool


def is_fused(node: fx.Node, backend: str) -> bool:
    """Whether a backend of torch.compile makes an operator part of a kernel with its neighbours."""
    if node.op != "call_function" or is_view(node) or collective_of(node) is not None:
        return False
    packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if packet in _BY_ROWS:
        return backend != "ts"
    return packet in _ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def traffic(graph: TrainingGraph, backend: str) -> Mapping[fx.Node, Traffic]:
    """The traffic of each operator that a backend fuses."""
    source = _sources(graph)
    kernel = _kernels(graph, source, backend)
    found: dict[fx.Node, Traffic] = {}
    begun: set[int] = set()
    read: set[tuple[int, fx.Node]] = set()
    needed = _needed_outside(graph, source, kernel)
    for node, number in kernel.items():
        nbytes = _written(node) if node in needed else 0
        for given in node.all_input_nodes:
            maker = source[given]
            if kernel.get(maker) != number and (number, maker) not in read:
                read.add((number, maker))
                nbytes += min(_written(given), _written(maker))
        found[node] = Traffic(nbytes, number not in begun)
        begun.add(number)
    return found


def _sources(graph: TrainingGraph) -> dict[fx.Node, fx.Node]:
    """Of each node the one that made its value: views and waits have made nothing."""
    source: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        base = node.args[0] if node.op == "call_function" and node.args else None
        through = is_view(node) and not is_wait(node) and isinstance(base, fx.Node)
        source[node] = source[base] if through else node  # type: ignore[index]
    return source


def _kernels(
    graph: TrainingGraph, source: Mapping[fx.Node, fx.Node], backend: str
) -> dict[fx.Node, int]:
    """The kernel of each operator that is fused.

    The level of an operator is the longest way to it, counted in operators that are not fused. Of
    one level, neighbours can be one kernel: no way between them leaves it and returns.
    """
    level: dict[fx.Node, int] = {}
    above: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while above[node] is not node:
            above[node] = node = above[above[node]]
        return node

    for node in graph.calls():
        makers = list(_makers(node, source, level))
        fused = is_fused(node, backend)
        level[node] = max(
            (level[m] + (not (fused and m in above and _beside(m, node))) for m in makers),
            default=0,
        )
        if fused:
            above[node] = node
            for maker in makers:
                if maker in above and level[maker] == level[node] and _beside(maker, node):
                    above[root(node)] = root(maker)
    numbers: dict[fx.Node, int] = {}
    return {node: numbers.setdefault(root(node), len(numbers)) for node in above}


def _makers(
    node: fx.Node, source: Mapping[fx.Node, fx.Node], known: Mapping[fx.Node, int]
) -> Iterator[fx.Node]:
    """The operators whose values a node reads."""
    for given in node.all_input_nodes:
        if source[given] in known:
            yield source[given]


def _beside(one: fx.Node, other: fx.Node) -> bool:
    """Whether two operators run in the same half of the step."""
    return bool(one.meta.get("phase") == other.meta.get("phase"))


def _needed_outside(
    graph: TrainingGraph, source: Mapping[fx.Node, fx.Node], kernel: Mapping[fx.Node, int]
) -> set[fx.Node]:
    """Operators whose value others than their kernel read."""
    needed: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op != "output" and source[node] is not node:
            continue
        for given in node.all_input_nodes:
            maker = source[given]
            if kernel.get(maker) != kernel.get(node) or node.op == "output":
                needed.add(maker)
    return needed


def _written(node: fx.Node) -> int:
    return sum(map(tensor_bytes, tensors(node)))
