"""How a call of a partitioned model is divided: as the plan says, or around its parameters."""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import BatchError
from autopar.graph import TrainingGraph
from autopar.partition import Partition, Ways, in_turn, mark, rows_of, scaled, splits_rows
from autopar.placement import even_rows
from autopar.plan import Plan
from autopar.runtime.agreement import same_everywhere

MakeWays = Callable[[TrainingGraph, Partition], Ways]


def ways_of_call(
    graph: TrainingGraph, plan: Plan, rank: int, total: int, slices: int, make_ways: MakeWays
) -> tuple[Ways, ...]:
    """The ways of a call before each axis; all ranks of the plan call this at once.

    Args:
        graph: the call as captured on this rank, with the axes of the plan.
        plan: how the model is partitioned.
        rank: this rank in the world.
        total: rows of the batch on all ranks.
        slices: into how many parts they are cut, of which the graph is of one.
        make_ways: finds the ways of a call that was not planned for, the same on every rank.

    Raises:
        BatchError: ranks have different numbers of rows, and whole rows are divided.
        DisagreementError: ranks of one axis are left with different programs before the next.
    """
    first = even_rows(total, slices)[0] if rows_of(graph) else 0
    partitions = {partition.axis: partition for partition in plan.partitions}

    def find(axis: str, graph: TrainingGraph) -> Ways:
        if graph.partitioned:
            same_everywhere({f"graph before {axis}": mark(graph)}, "This is an error of autopar.")
        known = partitions[axis].ways_of(graph, first)
        ways = make_ways(graph, partitions[axis]) if known is None else known
        uneven = first * slices != total
        if uneven and splits_rows(ways, graph, first, partitions[axis].ranks):
            raise BatchError(
                f"a batch of {total} rows is uneven over {plan.data_ranks} ranks, and each of "
                "them would divide its rows further. Give a batch that divides evenly."
            )
        return scaled(ways, graph, first, rows_of(graph))

    return tuple(ways for _, _, ways in in_turn(partitions, graph, plan.place(rank), find))
