"""`with_ranges`: ranges of `torch.profiler` around the blocks and collectives of a graph."""

from __future__ import annotations

from itertools import pairwise

from torch import fx
from torch.profiler import record_function

from autopar.core.ir.graph import TrainingGraph


def with_ranges(graph: fx.Graph, names: dict[str, str]) -> fx.Graph:
    """A copy of a graph with a range around successive operators of equal name.

    Args:
        graph: graph to copy.
        names: the name of each operator's range, by the operator's name.
    """
    made, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    made.output(made.graph_copy(graph, nodes))
    copies = {node.name: copy for node, copy in nodes.items()}
    order = [(name, copies[name]) for name in names if name in copies]
    begins = order[:1] + [b for a, b in pairwise(order) if names[a[0]] != names[b[0]]]
    last: fx.Node | None = None
    for name, node in begins:
        with made.inserting_before(node):
            if last is not None:
                made.call_function(_end, (last,))
            last = made.call_function(_begin, (names[name],))
    if last is not None:
        with made.inserting_before(made.output_node()):
            made.call_function(_end, (last,))
    return made


def range_names(graph: TrainingGraph) -> dict[str, str]:
    """The name of the range of each operator: its collective and axis, or its phase and block."""
    return {node.name: _range_name(node) for node in graph.calls()}


def _range_name(node: fx.Node) -> str:
    if "_c10d_functional" in str(node.target):
        operator = str(node.target).split(".")[1]
        of = node.meta.get("of", "")
        return f"autopar: {operator} of {of}" if of else f"autopar: {operator}"
    block = node.meta.get("block") or "outside of blocks"
    return f"autopar: {node.meta.get('phase')} of {block}"


def _begin(name: str) -> record_function:
    found = record_function(name)
    found.__enter__()
    return found


def _end(found: record_function) -> None:
    found.__exit__(None, None, None)
