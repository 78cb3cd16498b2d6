"""What values depend on: whether every stage can have them for itself, or only one makes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from autopar.ir.graph import TrainingGraph, has_batch_dim
from autopar.ir.roles import BatchTotal, Parameter, StageInput
from autopar.passes.core.collective_ops import STARTS, wait
from autopar.passes.core.node_builder import is_random

Dependence = Literal["free", "held", "late", "staged"]
"""free: of inputs and constants alone, which every stage is given. held: a view or copy of
parameters alone, or what they are gathered to. late: of totals that the forwards add up. staged:
all other values, which one stage makes."""

aten = torch.ops.aten

COSTLY_OPS = frozenset(
    {
        aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.dot, aten.mv,
        aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
    }
)  # fmt: skip
"""Operators that are not run twice to save a transfer."""

LAYOUT_OPS = frozenset(
    {
        aten.t, aten.transpose, aten.permute, aten.view, aten._unsafe_view, aten.reshape,
        aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.select, aten.split,
        aten.split_with_sizes, aten._to_copy, aten.clone, aten.contiguous, aten.narrow,
        aten.chunk, aten.alias, aten.detach, aten.cat,
    }
)  # fmt: skip
"""Operators that only lay a value out in another way."""

ALIASES = (operator.getitem, wait)


def op_packet(node: fx.Node) -> object:
    """The operator of a node without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def dependences(graph: TrainingGraph) -> dict[fx.Node, Dependence]:
    """What every node depends on."""
    found: dict[fx.Node, Dependence] = {}
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        match role:
            case Parameter():
                found[node] = "held"
            case BatchTotal(_, True):
                found[node] = "late"
            case StageInput():
                found[node] = "staged"
            case _:
                found[node] = "free"
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            found[node] = "free"
        elif node.op == "call_function":
            found[node] = _kind(node, {found[n] for n in node.all_input_nodes})
    return found


def _kind(node: fx.Node, given: set[Dependence]) -> Dependence:
    forward = node.meta["phase"] == "forward"
    if "late" in given and (given <= {"free", "late"} or (forward and not has_batch_dim(node))):
        return "late"
    if is_random(node) or op_packet(node) in COSTLY_OPS:
        return "staged"
    if given <= {"free"}:
        return "free"
    lays_out = op_packet(node) in LAYOUT_OPS or node.target in STARTS or node.target in ALIASES
    return "held" if given == {"held"} and lays_out else "staged"


@dataclass(frozen=True)
class ParameterUse:
    """A forward operator that reads a parameter.

    Attributes:
        node: the operator.
        name: of the parameter.
        number: how many operators have read it before.
    """

    node: fx.Node
    name: str
    index: int


def parameter_uses(graph: TrainingGraph) -> Iterator[ParameterUse]:
    """The uses of parameters by the forward, in its order."""
    kinds, counts = dependences(graph), dict[str, int]()
    names: dict[fx.Node, tuple[str, ...]] = {
        node: (role.name,)
        for role, node in zip(graph.inputs, graph.placeholders, strict=True)
        if isinstance(role, Parameter)
    }
    for node in graph.calls():
        if node.meta["phase"] == "backward":
            return
        read = tuple(dict.fromkeys(n for i in node.all_input_nodes for n in names.get(i, ())))
        if kinds[node] == "held":
            names[node] = read
            continue
        for name in read:
            number = counts.get(name, 0)
            counts[name] = number + 1
            yield ParameterUse(node, name, number)


def forward_stages(
    graph: TrainingGraph, wanted: Mapping[str, tuple[int, ...]]
) -> dict[fx.Node, int]:
    """The stage of each forward operator that one stage makes: that of the last use before it.

    Args:
        graph: as captured.
        wanted: for each parameter the stage of each of its uses; later ones are like the last.
    """
    at: dict[fx.Node, int] = {}
    for use in parameter_uses(graph):
        known = wanted.get(use.name, (0,))
        stage = known[min(use.index, len(known) - 1)]
        at[use.node] = max(at.get(use.node, 0), stage)
    kinds, found, now = dependences(graph), dict[fx.Node, int](), 0
    for node in graph.calls():
        if node.meta["phase"] == "backward":
            break
        now = max(now, at.get(node, 0))
        if kinds[node] == "staged":
            found[node] = now
    return found
