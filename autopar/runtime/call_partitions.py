"""How a call of a partitioned model is divided: as the plan says, or around its parameters."""

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


def call_strategies(
    graph: TrainingGraph,
    plan: Plan,
    rank: int,
    total: int,
    slices: int,
    make_strategies: MakeStrategies,
) -> tuple[NodeStrategies, ...]:
    """The ways of a call before each axis; all ranks of the plan call this at once.

    Args:
        graph: the call as captured on this rank, with the axes of the plan.
        plan: how the model is partitioned.
        rank: this rank in the world.
        total: rows of the batch on all ranks.
        slices: into how many parts they are cut, of which the graph is of one.
        make_strategies: finds the ways of a call that was not planned for, the same on every rank.

    Raises:
        BatchError: ranks have different numbers of rows, and whole rows are divided.
        DisagreementError: ranks of one axis are left with different programs before the next.
    """
    first = even_rows(total, slices)[0] if rows_of(graph) else 0
    partitions = {partition.axis: partition for partition in plan.partitions}

    def find(axis: str, graph: TrainingGraph) -> NodeStrategies:
        if graph.partitioned:
            assert_same_across_ranks(
                {f"graph before {axis}": graph_hash(graph)}, "This is an error of autopar."
            )
        known = partitions[axis].strategies_for(graph, first)
        op_strategies = make_strategies(graph, partitions[axis]) if known is None else known
        uneven = first * slices != total
        if uneven and needs_planned_rows(op_strategies, graph, first, partitions[axis].ranks):
            raise BatchError(
                f"a batch of {total} rows is uneven over {plan.dp_size} ranks, and each of "
                "them would divide its rows further. Give a batch that divides evenly."
            )
        return rescale_interleave(op_strategies, graph, first, rows_of(graph))

    return tuple(
        op_strategies
        for _, _, op_strategies in partition_in_order(
            partitions, graph, plan.mesh_coordinate(rank), find
        )
    )
