"""Notes on operators and parameters that are whole on every rank of an axis."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, elements, operands, source_line
from autopar.core.ir.roles import Parameter
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.operators.views import factors, view
from autopar.passes.rules.registry import is_supported, loops_of, rule_of


def unsupported_notes(graph: TrainingGraph, axis: str) -> tuple[str, ...]:
    """A note for each operator without a rule in which probing finds no loop."""
    found: dict[str, list[fx.Node]] = {}
    for node in graph.calls():
        if _is_replicated(node):
            found.setdefault(str(node.target), []).append(node)
    return tuple(
        f"{name} has no rule: whole on every rank of {axis} ({len(nodes)}x"
        + (f", first at {line})" if (line := source_line(nodes[0])) else ")")
        for name, nodes in found.items()
    )


def _is_replicated(node: fx.Node) -> bool:
    if not hasattr(node.target, "_schema") or is_supported(node.target):
        return False
    values = (n.meta["val"] for n in operands(node))
    return not all(isinstance(v, torch.Tensor) for v in values) or not loops_of(Operator.of(node))


def indivisible_notes(graph: TrainingGraph, sharded: Collection[str], axis: str) -> tuple[str, ...]:
    """A note for each number of heads or groups that ranks do not divide.

    Placeholders whose names are not in `sharded` are replicated.
    """
    ranks = graph.axes[axis]
    whole = [
        graph.parameters[role.name]
        for role, node in zip(graph.inputs, graph.placeholders, strict=True)
        if isinstance(role, Parameter) and node.name not in sharded
    ]
    notes: dict[object, str] = {}
    for node in graph.calls():
        if node.meta["phase"] != "forward" or rule_of(node.target) is not view:
            continue
        in_block = [p for p in whole if p.block == node.meta["block"] and len(p.shape) > 1]
        for size, count in _indivisible(node, ranks):
            patterns = {re.sub(r"\.\d+\.", ".*.", p.name) for p in in_block if size in p.shape}
            names = ", ".join(sorted(patterns))
            if names and (names, size, count) not in notes:
                others = [str(n) for n in (count - count % ranks, count + -count % ranks) if n]
                where = f" at {line}" if (line := source_line(node)) else ""
                notes[names, size, count] = (
                    f"{names}: whole on every rank of {axis}. Forward views {size} as {count} x "
                    f"{size // count}{where}, and {ranks} ranks cannot share {count} "
                    f"({' or '.join(others)} would do)"
                )
    return tuple(notes.values())


def _indivisible(node: fx.Node, ranks: int) -> Iterator[tuple[int, int]]:
    """The dims that a view splits or merges, with the largest factor, if ranks divide no factor.

    The last factor is the width of a head or group, which is not sharded.
    """
    (source,), (result,) = operands(node), elements(node)
    before, after = tuple(source.meta["val"].shape), tuple(result.shape)
    for coarse, place in ((before, 1), (after, 2)):
        dims: dict[int, list[int]] = {}
        for factor in factors(before, after):
            dims.setdefault(factor[place].dim, []).append(factor[0])  # type: ignore[union-attr]
        for dim, found in dims.items():
            outer = [n for n in found[:-1] if n > 1]
            if outer and all(n % ranks for n in outer):
                yield coarse[dim], max(outer)
