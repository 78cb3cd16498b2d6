"""Parameters that are gathered once a step: by its first micro-batch, for those behind it too.

Under ZeRO 1 and 2 parameters lie in shards between steps, and are whole within one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import UnshardedParam
from autopar.passes.core.node_builder import add_input

GATHER_ONCE_STAGES = (1, 2)
"""ZeRO stages under which they are."""


def once_gathered_params(graph: TrainingGraph, stages: Mapping[str, int]) -> dict[str, fx.Node]:
    """The nodes that are such parameters, whole, by name.

    Args:
        graph: lowered, of one micro-batch.
        stages: ZeRO stage of each block.
    """
    return {
        name: node
        for node in graph.calls()
        if (name := node.meta.get("gathered")) and node.meta["phase"] == "forward"
        if stages[graph.parameters[name].block] in GATHER_ONCE_STAGES
    }


def export_gathered(graph: TrainingGraph, stages: Mapping[str, int]) -> TrainingGraph:
    """The program of the first micro-batch: it also returns what the others need not gather."""
    graph = graph.copy()
    found = once_gathered_params(graph, stages)
    return graph.with_results({UnshardedParam(name): node for name, node in found.items()})


def import_gathered(graph: TrainingGraph, stages: Mapping[str, int]) -> TrainingGraph:
    """The program of a later micro-batch: it is given what the first has gathered.

    Values keep their names, so that all have the same backwards.
    """
    graph = graph.copy()
    for name, node in once_gathered_params(graph, stages).items():
        graph, given = add_input(
            graph, UnshardedParam(name), f"{node.name}_given", node.meta["val"]
        )
        given.meta = {**node.meta, "phase": "forward"}
        node.replace_all_uses_with(given)
        read = node.all_input_nodes
        graph.graph.erase_node(node)
        given.name = node.name
        _forget(graph.graph, read)
    return graph


def _forget(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erases operators that nobody reads any more, and what only they read."""
    todo = dict.fromkeys(nodes)
    while todo:
        node, _ = todo.popitem()
        if node.op == "call_function" and not node.users:
            todo |= dict.fromkeys(node.all_input_nodes)
            graph.erase_node(node)
