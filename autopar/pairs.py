"""`paired`: which nodes of two graphs do the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.graph import TrainingGraph, tensors

LAID_OUT = ("expand", "clone")
"""What torch writes, or not, as the number of rows makes values lie."""


def paired(
    first: TrainingGraph, second: TrainingGraph
) -> tuple[tuple[fx.Node, fx.Node], ...] | None:
    """Every node of a graph with that of another that does the same; None if one has none.

    The other may lay values out where this need not: of one row nothing is expanded or copied.
    """
    source: dict[fx.Node, fx.Node] = {}  # what a node of the other is but for its layout
    found: dict[fx.Node, fx.Node] = {}
    others = iter(second.graph.nodes)
    for node in first.graph.nodes:
        for other in others:
            if _same(node, other, found, source):
                found[node] = source[other] = other
                break
            if operator_name(other) not in LAID_OUT:
                return None
            source[other] = source[other.all_input_nodes[0]]
        else:
            return None
    return None if next(others, None) is not None else tuple(found.items())


def _same(
    node: fx.Node,
    other: fx.Node,
    found: Mapping[fx.Node, fx.Node],
    source: Mapping[fx.Node, fx.Node],
) -> bool:
    """Whether two nodes compute the same of the same."""
    if node.op != other.op or len(node.all_input_nodes) != len(other.all_input_nodes):
        return False
    if node.op == "placeholder":
        return True
    inputs = zip(node.all_input_nodes, other.all_input_nodes, strict=True)
    dims = ([t.dim() for t in tensors(n)] for n in (node, other))
    return (
        (node.target == other.target or node.op == "get_attr")
        and all(source[found[one]] is source[two] for one, two in inputs)
        and next(dims) == next(dims)
    )


def operator_name(node: fx.Node) -> str:
    """The name of an operator without its overload; "" of what is none."""
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
