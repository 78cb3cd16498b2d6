"""Partitions a graph along several mesh axes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import fx

from autopar.ir.graph import TrainingGraph, elements, operands
from autopar.ir.placement import OpStrategy, Replicate
from autopar.passes.core.collective_ops import is_name
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.plan.partition import NodeStrategies


def partition_in_order(
    axes: Iterable[str],
    graph: TrainingGraph,
    coordinate: Mapping[str, int],
    find_strategies: Callable[[str, TrainingGraph], NodeStrategies],
) -> Iterator[tuple[str, TrainingGraph, NodeStrategies]]:
    """Yields each axis, the graph before partitioning along it, and the strategies found.

    Args:
        axes: names of the axes, in order of partitioning.
        graph: captured graph, with the sizes of the axes.
        coordinate: this rank's coordinate on each axis.
        find_strategies: finds the strategies of a graph along an axis.
    """
    last: PartitionAxis | None = None
    for axis in axes:
        graph = graph if last is None else last(graph).graph
        op_strategies = find_strategies(axis, graph)
        last = PartitionAxis(axis, coordinate[axis], op_strategies)
        yield axis, graph, op_strategies


def complete_strategies(
    graph: TrainingGraph, op_strategies: NodeStrategies
) -> dict[fx.Node, OpStrategy]:
    """The strategy of every operator and placeholder; unnamed nodes are replicated."""
    named, whole = dict(op_strategies), Replicate()
    return {
        node: named.get(node.name)
        or OpStrategy((whole,) * len(operands(node)), (whole,) * len(elements(node)))
        for node in graph.graph.nodes
        if node.op != "output" and not is_name(node)
    }
