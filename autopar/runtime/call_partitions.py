"""Op strategies for a call of a partitioned model: the plan's, or new ones for its parameters."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import BatchError
from autopar.ir.graph import TrainingGraph
from autopar.ir.placement import even_rows
from autopar.passes.tensor_parallel.partition_axes import partition_in_order
from autopar.plan.partition import (
    NodeStrategies,
    Partition,
    graph_hash,
    needs_planned_rows,
    rescale_interleave,
    rows_of,
)
from autopar.report.plan import Plan
from autopar.runtime.agreement.consensus import assert_same_across_ranks

MakeStrategies = Callable[[TrainingGraph, Partition], NodeStrategies]
"""Finds strategies for a call that the plan does not cover, the same on every rank."""


def call_strategies(
    graph: TrainingGraph,
    plan: Plan,
    rank: int,
    global_rows: int,
    num_slices: int,
    make_strategies: MakeStrategies,
) -> tuple[NodeStrategies, ...]:
    """The strategies of a call for each partitioned axis; all ranks call this at once.

    Args:
        graph: the captured slice of the batch, with the axes of the plan.
        plan: the plan.
        rank: rank in the world.
        global_rows: rows of the batch on all ranks.
        num_slices: number of slices of the batch.
        make_strategies: finds strategies for a call that the plan does not cover.

    Raises:
        BatchError: the batch is uneven over ranks, and strategies shard rows further.
        DisagreementError: ranks of an axis have different graphs before the next axis.
    """
    rows = even_rows(global_rows, num_slices)[0] if rows_of(graph) else 0
    partitions = {partition.axis: partition for partition in plan.partitions}

    def find_strategies(axis: str, graph: TrainingGraph) -> NodeStrategies:
        if graph.partitioned:
            assert_same_across_ranks(
                {f"graph before {axis}": graph_hash(graph)}, "This is an error of autopar."
            )
        partition = partitions[axis]
        op_strategies = partition.strategies_for(graph, rows)
        if op_strategies is None:
            op_strategies = make_strategies(graph, partition)
        is_uneven = rows * num_slices != global_rows
        if is_uneven and needs_planned_rows(op_strategies, graph, rows, partition.ranks):
            raise BatchError(
                f"a batch of {global_rows} rows is uneven over {plan.dp_size} ranks, and each of "
                "them would divide its rows further. Give a batch that divides evenly."
            )
        return rescale_interleave(op_strategies, graph, rows, rows_of(graph))

    coordinate = plan.mesh_coordinate(rank)
    steps = partition_in_order(partitions, graph, coordinate, find_strategies)
    return tuple(op_strategies for _, _, op_strategies in steps)
