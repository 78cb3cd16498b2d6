"""Collectives in a graph before they are lowered."""

import pytest

from autopar.errors import PassError
from autopar.passes.core.collective_ops import (
    collective,
    replace_collective,
    start_all_reduce,
    starts,
)
from tests.passes.golden import two_layers
from tests.passes.parity import AXIS


def test_a_collective_is_not_replaced_by_its_inputs() -> None:
    graph = two_layers(ranks=2, rows=4).graph(0).copy()
    node = next(iter(graph.calls()))
    with graph.graph.inserting_after(node):
        collective(graph.graph, node, start_all_reduce, [node], AXIS)
    start = next(each for each in starts(graph) if node in each.all_input_nodes)
    with pytest.raises(PassError, match="not results of a collective"):
        replace_collective(graph.graph, start, [node])
