"""`in_order_of_rank0`: the captured graph of every rank, in the order of rank 0's.

Python iterates over a set of strings in another order in each process. A forward that does so
runs the same operators on every rank, in another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.runtime.agreement.consensus import broadcast_from_rank0, gather_objects, is_multi_rank

EVENT = "compares the order of operators"


def in_order_of_rank0(graph: TrainingGraph) -> TrainingGraph:
    """The graph with the order and names of rank 0's nodes; all ranks call this at once.

    Graphs that differ in more than their order stay as they are.
    """
    if not is_multi_rank():
        return graph
    if _is_same(_digest(f"{n.name} {_text(n)}" for n in graph.graph.nodes)):
        return graph
    nodes = list(_from_results(graph))
    numbers = {node: number for number, node in enumerate(nodes)}
    if not _is_same(_digest(_text(node, numbers) for node in nodes)):
        return graph
    order = broadcast_from_rank0(lambda: [(numbers[n], n.name) for n in graph.graph.nodes])
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for number, name in order:
        node = nodes[number]
        args: Any = fx.map_arg(node.args, copies.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, copies.__getitem__)
        copies[node] = copy = made.create_node(node.op, node.target, args, kwargs, name, node.type)
        copy.meta = dict(node.meta)
    return replace(graph, graph=made)


def _is_same(digest: str) -> bool:
    return len(set(gather_objects(digest, EVENT))) == 1


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _from_results(graph: TrainingGraph) -> Iterator[fx.Node]:
    """All nodes, each behind its arguments, in an order that does not depend on the graph's.

    Nodes without a use come last, in the order of the graph.
    """
    seen: set[fx.Node] = set()
    for root in (*graph.placeholders, graph.output_node, *graph.graph.nodes):
        stack = [root]
        while stack:
            node = stack[-1]
            ahead = [] if node in seen else [x for x in node.all_input_nodes if x not in seen]
            if ahead:
                stack.extend(reversed(ahead))
                continue
            stack.pop()
            if node not in seen:
                seen.add(node)
                yield node


def _text(node: fx.Node, numbers: Mapping[fx.Node, int] | None = None) -> str:
    """Operator and arguments of a node, by number or name; constants are named by their place."""
    target = "constant" if node.op == "get_attr" else node.target
    arguments = [numbers[x] if numbers else x.name for x in node.all_input_nodes]
    return f"{node.op} {target} {arguments}"
