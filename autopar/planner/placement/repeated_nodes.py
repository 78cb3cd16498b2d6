"""`repeated`: corresponding nodes of repeated blocks, which share one strategy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.placement import Placement
from autopar.core.ir.roles import Parameter

Likeness = tuple[Any, ...]


def repeated(
    graph: TrainingGraph, pins: Mapping[str, Placement] | None = None
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each node and its representative: the corresponding node of the first equal block.

    Blocks are equal if their names differ only in numbers, and they have the same operators on the
    same shapes in the same order.
    """
    blocks: dict[str, list[fx.Node]] = {}
    for node, block in block_of_nodes(graph).items():
        if block:
            blocks.setdefault(block, []).append(node)
        else:
            yield node, node
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    first: dict[Likeness, list[fx.Node]] = {}
    for name, nodes in blocks.items():
        lies = ((pins or {}).get(getattr(roles.get(node), "name", "")) for node in nodes)
        likeness = (re.sub(r"\d+", "*", name), *lies, *map(_likeness, nodes))
        yield from zip(nodes, first.setdefault(likeness, nodes), strict=True)


def block_of_nodes(graph: TrainingGraph) -> dict[fx.Node, str]:
    """Block of every node but the output.

    Autograd's gradient sums have no source line, so they belong to the block of their last operand.
    """
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    found: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        role = roles.get(node)
        if isinstance(role, Parameter):
            found[node] = graph.parameters[role.name].block
        elif node.op == "call_function":
            summed = node.meta["phase"] == "backward" and node.target is torch.ops.aten.add.Tensor
            found[node] = found[max(node.all_input_nodes)] if summed else node.meta["block"]
        elif node.op != "output":
            found[node] = ""
    return found


def _likeness(node: fx.Node) -> Likeness:
    """Key of a node's possible strategies: operator, tensors and arguments."""
    if node.op != "call_function":
        return (node.op, _types(node))
    arguments = fx.map_arg((node.args, dict(node.kwargs)), _types)
    return (str(node.target), _types(node), str(arguments))


def _types(node: fx.Node) -> str:
    return str([(tuple(t.shape), t.stride(), t.dtype) for t in tensors(node)])
