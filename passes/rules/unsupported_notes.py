"""Notes on operators that are replicated because no rule splits them."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from autopar.ir.graph import TrainingGraph, operands, source_line
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.registry import is_supported, loops_of


def unsupported_notes(graph: TrainingGraph, axis: str) -> tuple[str, ...]:
    """A note for each operator without a rule in which probing finds no loop.

    Args:
        graph: graph as captured, on whole tensors.
        axis: name of the mesh axis.
    """
    first: dict[str, fx.Node] = {}
    count: Counter[str] = Counter()
    for node in graph.calls():
        if _is_replicated(node):
            name = str(node.target)
            first.setdefault(name, node)
            count[name] += 1
    return tuple(
        f"{name} has no rule: whole on every rank of {axis} ({count[name]}x"
        + (f", first at {line})" if (line := source_line(node)) else ")")
        for name, node in first.items()
    )


def _is_replicated(node: fx.Node) -> bool:
    if not hasattr(node.target, "_schema") or is_supported(node.target):
        return False
    values = (n.meta["val"] for n in operands(node))
    return not all(isinstance(v, torch.Tensor) for v in values) or not loops_of(Operator.of(node))
