"""`partition_in_order`: partitions a graph along several axes, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.partition import NodeStrategies
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis


def partition_in_order(
    axes: Iterable[str],
    graph: TrainingGraph,
    coordinate: Mapping[str, int],
    find_strategies: Callable[[str, TrainingGraph], NodeStrategies],
) -> Iterator[tuple[str, TrainingGraph, NodeStrategies]]:
    """Partitions a captured graph along axes, one after the other.

    Yields each axis, the graph before partitioning along it, and the strategies found for both.
    """
    last: PartitionAxis | None = None
    for axis in axes:
        graph = graph if last is None else last(graph).graph
        op_strategies = find_strategies(axis, graph)
        last = PartitionAxis(axis, coordinate[axis], op_strategies)
        yield axis, graph, op_strategies
