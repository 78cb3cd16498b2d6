"""Operators that stay whole on every rank because nobody knows how to split them."""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from autopar.ir.graph import TrainingGraph, operands, source_line
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.registry import is_supported, loops_of


def unsupported_notes(graph: TrainingGraph, axis: str) -> tuple[str, ...]:
    """A note for each operator without a rule in which probing found no loop either.

    Args:
        graph: as captured, on whole tensors.
        axis: the mesh axis, to name it.
    """
    met: dict[str, fx.Node] = {}
    count: Counter[str] = Counter()
    for node in graph.calls():
        if _stays_whole(node):
            name = str(node.target)
            met.setdefault(name, node)
            count[name] += 1
    return tuple(
        f"{name} has no rule: whole on every rank of {axis} ({count[name]}x"
        + (f", first at {line})" if (line := source_line(node)) else ")")
        for name, node in met.items()
    )


def _stays_whole(node: fx.Node) -> bool:
    if not hasattr(node.target, "_schema") or is_supported(node.target):
        return False
    given = (n.meta["val"] for n in operands(node))
    return not all(isinstance(v, torch.Tensor) for v in given) or not loops_of(Operator.of(node))
