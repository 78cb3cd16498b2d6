"""`routed_values`: values whose number of rows is known only in a step.

Rows that ranks send to the ranks of their experts are as many as the router decides. Sizes of such
values in a graph are those of even shares.
"""

from __future__ import annotations

from torch import fx

from autopar.core.operators.routing import arriving_rows, row_counts
from autopar.core.operators.row_copies import first_rows, passed_rows, sum_rows

_UNSIZED = (first_rows, passed_rows)


def routed_values(graph: fx.Graph) -> set[fx.Node]:
    """Nodes between the exchanges that bring rows to their experts and back."""
    found = set[fx.Node]()
    for node in graph.nodes:
        reads = not found.isdisjoint(node.all_input_nodes)
        if node.target in _UNSIZED or (reads != sends_routed_rows(node) and not _is_put_back(node)):
            found.add(node)
    return found


def _is_put_back(node: fx.Node) -> bool:
    """Whether a node puts distinct rows where they came from, which has a known size."""
    return node.target is sum_rows and not isinstance(node.args[2], fx.Node)


def sends_routed_rows(node: fx.Node) -> bool:
    """Whether a node exchanges rows with the ranks of their experts, a copy for each of these."""
    return any(_counts_copies(source) for source in node.all_input_nodes)


def _counts_copies(node: fx.Node) -> bool:
    is_distinct = len(node.args) > 2 and node.args[2]
    return (node.target is row_counts and not is_distinct) or node.target is arriving_rows
