"""Partitions a graph along several mesh axes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import fx

from autopar.ir.graph import TrainingGraph, elements, operands
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Replicate
from autopar.passes.core.collective_ops import is_name
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.plan.partition import NodeStrategies


def partition_in_order(
    axes: Iterable[str],
    graph: TrainingGraph,
    place: Mapping[str, int],
    find: Callable[[str, TrainingGraph], NodeStrategies],
) -> Iterator[tuple[str, TrainingGraph, NodeStrategies]]:
    """Each axis, the graph of a rank before it is partitioned along it, and its ways.

    Args:
        axes: in the order of partitioning.
        graph: as captured, with the sizes of the axes.
        place: where the rank stands on each of them.
        find: the ways of a graph along an axis.
    """
    done: PartitionAxis | None = None
    for axis in axes:
        graph = done(graph).graph if done is not None else graph
        op_strategies = find(axis, graph)
        done = PartitionAxis(axis, place[axis], op_strategies)
        yield axis, graph, op_strategies


def complete_strategies(
    graph: TrainingGraph, op_strategies: NodeStrategies
) -> dict[fx.Node, OpStrategy]:
    """The way of every operator and placeholder: those that are not named are whole."""
    found, whole = dict(op_strategies), Replicate()
    return {
        node: found.get(node.name)
        or OpStrategy((whole,) * len(operands(node)), (whole,) * len(elements(node)))
        for node in graph.graph.nodes
        if node.op != "output" and not is_name(node)
    }
