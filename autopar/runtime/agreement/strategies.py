"""`agreed_strategies`: strategies of operators along each axis, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable

from autopar.capture.call import BatchShard, UnevenRowsError
from autopar.core.common.world import rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.layout import Layout
from autopar.core.plan.partition import (
    NodeStrategies,
    Partition,
    needs_planned_rows,
    operators_hash,
    rescale_interleave,
    rows_of,
)
from autopar.core.plan.plan import Plan
from autopar.passes.tensor_parallel.partition_in_order import partition_in_order
from autopar.runtime.agreement.consensus import assert_same_across_ranks, broadcast_from_rank0
from autopar.runtime.agreement.ragged import have_all

MakeStrategies = Callable[[TrainingGraph, Partition], NodeStrategies]
"""Finds strategies for a call that the plan does not cover, the same on every rank."""

PlannedStrategies = dict[str, tuple[str, NodeStrategies]]
"""Hash of the graph and strategies of the first rank's first micro-batch, by axis."""

OWN_ERROR = "This is an error of autopar."
SAME_CODE = "No operator of forward may depend on the rank, or on how many rows it has."


def agreed_strategies(
    graph: TrainingGraph,
    plan: Plan,
    shard: BatchShard,
    make_strategies: MakeStrategies,
    planned: PlannedStrategies | None = None,
) -> tuple[NodeStrategies, ...]:
    """The strategies of a captured call along each axis; all ranks call this at once.

    Micro-batches of a call must shard alike what is summed over them. So the first one fills
    `planned`, and those of another size take it, adapted to their rows.

    Raises:
        UnevenRowsError: rows are uneven, and strategies shard those of a rank or micro-batch.
        DisagreementError: ranks of an axis have different graphs before the next axis.
    """
    planned = {} if planned is None else planned
    rows = shard.slices.sizes[0] if rows_of(graph) else 0
    is_uneven = bool(rows) and rows * shard.slices.count != shard.slices.rows
    partitions = {partition.axis: partition for partition in plan.partitions}

    def find_strategies(axis: str, graph: TrainingGraph) -> NodeStrategies:
        partition, digest, is_alike = partitions[axis], operators_hash(graph), True
        if axis in planned:
            before, op_strategies = planned[axis]
            is_alike = have_all(digest == before)
        else:
            op_strategies = _first_strategies(partition, graph, rows, make_strategies)
            planned[axis] = digest, op_strategies
        if is_uneven and (
            not is_alike or needs_planned_rows(op_strategies, graph, rows, partition.ranks)
        ):
            raise UnevenRowsError(
                f"a batch of {shard.slices.rows} rows is uneven over {plan.dp_size} ranks, and "
                "each of them would divide its rows further. Give a batch that divides evenly."
            )
        return rescale_interleave(op_strategies, graph, rows, rows_of(graph))

    coordinate = Layout(plan).coordinate(rank())
    steps = partition_in_order(partitions, graph, coordinate, find_strategies)
    return tuple(op_strategies for _, _, op_strategies in steps)


def _first_strategies(
    partition: Partition, graph: TrainingGraph, rows: int, make_strategies: MakeStrategies
) -> NodeStrategies:
    # Rank 0's graph is the one that was planned; others have their own rows and offsets.
    op_strategies = broadcast_from_rank0(lambda: partition.strategies_for(graph, rows))
    if graph.partitioned or op_strategies is not None:
        advice = OWN_ERROR if graph.partitioned else SAME_CODE
        digest = operators_hash(graph)
        assert_same_across_ranks({f"graph before {partition.axis}": digest}, advice)
    return make_strategies(graph, partition) if op_strategies is None else op_strategies
