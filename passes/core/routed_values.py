"""`routed_values`: values whose number of rows is known only in a step.

Rows that ranks send to the ranks of their experts are as many as the router decides. Sizes of such
values in a graph are those of even shares.
"""

from __future__ import annotations

from torch import fx

from autopar.operators.routing import row_counts


def routed_values(graph: fx.Graph) -> set[fx.Node]:
    """Nodes between the exchanges that bring rows to their experts and back."""
    found = set[fx.Node]()
    for node in graph.nodes:
        reads = not found.isdisjoint(node.all_input_nodes)
        if reads != sends_routed_rows(node):
            found.add(node)
    return found


def sends_routed_rows(node: fx.Node) -> bool:
    """Whether a node exchanges rows with the ranks of their experts."""
    return any(source.target is row_counts for source in node.all_input_nodes)
