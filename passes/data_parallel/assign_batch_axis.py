"""`AssignBatchAxis`: the batch axis mapped to a mesh axis, with one slice on each rank.

The batch axis serves ranks and micro-batches alike, and is no axis of the mesh. Its collectives
would have no process group to run in.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.ir.batch_slicing import BATCH
from autopar.core.ir.graph import GraphProperty, TrainingGraph
from autopar.passes.core.collective_ops import (
    axis_of,
    start_all_gather,
    start_reduce_scatter,
    starts,
)
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class AssignBatchAxis(Pass):
    """Turns collectives over the batch axis into collectives over a mesh axis.

    Before: the graph of one slice of the batch. After: its collectives are over `axis`. Tier:
    exact.
    """

    axis: str
    ensures = frozenset({GraphProperty.BATCH_SHARDED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        for start in starts(graph):
            if axis_of(start) == BATCH:
                index = 2 if start.target in (start_reduce_scatter, start_all_gather) else 1
                start.args = (*start.args[:index], self.axis, *start.args[index + 1 :])
        return PassResult(graph)
