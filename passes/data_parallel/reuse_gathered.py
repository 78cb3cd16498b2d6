"""Parameters that the first micro-batch of a step gathers for all micro-batches.

Under ZeRO stages 1 and 2, parameters are sharded between steps and unsharded within a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.ir.roles import UnshardedParam
from autopar.passes.core.node_builder import add_input

GATHER_ONCE_STAGES = (1, 2)
"""ZeRO stages that gather parameters once a step."""


def once_gathered_params(
    graph: TrainingGraph, zero_stages: Mapping[str, int]
) -> dict[str, fx.Node]:
    """The gathered value of each parameter that a step gathers once, by name.

    Args:
        graph: lowered graph of one micro-batch.
        zero_stages: ZeRO stage of each block.
    """
    return {
        name: node
        for node in graph.calls()
        if (name := node.meta.get("gathered")) and node.meta["phase"] == "forward"
        if zero_stages[graph.parameters[name].block] in GATHER_ONCE_STAGES
    }


def export_gathered(graph: TrainingGraph, zero_stages: Mapping[str, int]) -> TrainingGraph:
    """The program of the first micro-batch, which also returns the gathered parameters."""
    graph = graph.copy()
    found = once_gathered_params(graph, zero_stages)
    return graph.with_results({UnshardedParam(name): node for name, node in found.items()})


def import_gathered(graph: TrainingGraph, zero_stages: Mapping[str, int]) -> TrainingGraph:
    """The program of a later micro-batch, which takes the gathered parameters as inputs.

    Values keep their names, so that all micro-batches share a backward.
    """
    graph = graph.copy()
    for name, node in once_gathered_params(graph, zero_stages).items():
        graph, unsharded = add_input(
            graph, UnshardedParam(name), f"{node.name}_given", node.meta["val"]
        )
        unsharded.meta = {**node.meta, "phase": "forward"}
        node.replace_all_uses_with(unsharded)
        sources = node.all_input_nodes
        graph.graph.erase_node(node)
        unsharded.name = node.name
        _erase_unused(graph.graph, sources)
    return graph


def _erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erases operators without users, and then operands that have no users left."""
    todo = dict.fromkeys(nodes)
    while todo:
        node, _ = todo.popitem()
        if node.op == "call_function" and not node.users:
            todo |= dict.fromkeys(node.all_input_nodes)
            graph.erase_node(node)
