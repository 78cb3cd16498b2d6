"""`dependences`: whether every stage can compute a value, or only one."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, has_batch_dim
from autopar.core.ir.roles import BatchTotal, Parameter, StageInput
from autopar.core.operators.attention import attention, attention_backward
from autopar.core.operators.attention_blocks import BLOCKS
from autopar.passes.core.collective_ops import STARTS, wait
from autopar.passes.core.node_builder import is_random

Dependence = Literal["inputs", "parameters", "totals", "staged"]
"""Dependence of a value.

- inputs: depends on inputs and constants alone, so every stage can compute it
- parameters: a view, copy or gather of parameters alone
- totals: depends on totals over all forwards
- staged: any other value; a single stage computes it
"""

aten = torch.ops.aten

COSTLY_OPS = frozenset(
    {
        aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.dot, aten.mv,
        aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention,
        attention.overloadpacket, attention_backward.overloadpacket,
        *(block.overloadpacket for block in BLOCKS),
    }
)  # fmt: skip
"""Operators that cost more to run on every stage than to run once and send the result."""

LAYOUT_OPS = frozenset(
    {
        aten.t, aten.transpose, aten.permute, aten.view, aten._unsafe_view, aten.reshape,
        aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.select, aten.split,
        aten.split_with_sizes, aten._to_copy, aten.clone, aten.contiguous, aten.narrow,
        aten.chunk, aten.alias, aten.detach, aten.cat,
    }
)  # fmt: skip
"""Operators that change only shape, order or dtype."""

_MOVES_DATA = (*STARTS, operator.getitem, wait)


def op_packet(node: fx.Node) -> object:
    """The operator of a node without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def dependences(graph: TrainingGraph) -> dict[fx.Node, Dependence]:
    """The dependence of every node."""
    found: dict[fx.Node, Dependence] = {}
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    for node in graph.graph.nodes:
        match roles.get(node):
            case Parameter():
                found[node] = "parameters"
            case BatchTotal(_, True):
                found[node] = "totals"
            case StageInput():
                found[node] = "staged"
            case _ if node.op == "call_function":
                found[node] = _dependence(node, {found[n] for n in node.all_input_nodes})
            case _ if node.op != "output":
                found[node] = "inputs"
    return found


def _dependence(node: fx.Node, operands: set[Dependence]) -> Dependence:
    scalar = node.meta["phase"] == "forward" and not has_batch_dim(node)
    if "totals" in operands and (operands <= {"inputs", "totals"} or scalar):
        return "totals"
    if is_random(node) or op_packet(node) in COSTLY_OPS:
        return "staged"
    if operands <= {"inputs"}:
        return "inputs"
    moves_data = op_packet(node) in LAYOUT_OPS or node.target in _MOVES_DATA
    return "parameters" if operands == {"parameters"} and moves_data else "staged"


@dataclass(frozen=True)
class ParameterUse:
    """A forward operator that reads a parameter after `index` other uses of it."""

    node: fx.Node
    name: str
    index: int


def parameter_uses(graph: TrainingGraph) -> Iterator[ParameterUse]:
    """The uses of parameters by the forward, in execution order."""
    found, counts = dependences(graph), Counter[str]()
    roles = zip(graph.inputs, graph.placeholders, strict=True)
    names = {node: [role.name] for role, node in roles if isinstance(role, Parameter)}
    for node in graph.calls():
        if node.meta["phase"] == "backward":
            return
        read = list(dict.fromkeys(n for i in node.all_input_nodes for n in names.get(i, ())))
        if found[node] == "parameters":
            names[node] = read
            continue
        for name in read:
            yield ParameterUse(node, name, counts[name])
            counts[name] += 1


def forward_stages(
    graph: TrainingGraph, stages_of_uses: Mapping[str, tuple[int, ...]]
) -> dict[fx.Node, int]:
    """The stage of each staged forward operator: the highest of the parameter uses before it.

    Uses after those in `stages_of_uses` have the stage of the last one.
    """
    first: dict[fx.Node, int] = {}
    for use in parameter_uses(graph):
        stages = stages_of_uses.get(use.name, (0,))
        stage = stages[min(use.index, len(stages) - 1)]
        first[use.node] = max(first.get(use.node, 0), stage)
    found, current = dict[fx.Node, int](), 0
    for node, dependence in dependences(graph).items():
        if node.op != "call_function":
            continue
        if node.meta["phase"] == "backward":
            break
        current = max(current, first.get(node, 0))
        if dependence == "staged":
            found[node] = current
    return found
