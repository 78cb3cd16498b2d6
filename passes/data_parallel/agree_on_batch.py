"""`AgreeOnBatch`: checksums that show whether all ranks of a model have the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autopar.ir.graph import TrainingGraph
from autopar.ir.placement import Partial, Replicate, Varying
from autopar.ir.roles import BatchChecksum, ChecksumSum
from autopar.passes.core.collective_ops import annotate, collective, start_all_reduce
from autopar.passes.core.node_builder import add_input, fake_like
from autopar.passes.core.pass_base import Pass, PassResult

CHECKSUM_SIZE = 4


@dataclass(frozen=True)
class AgreeOnBatch(Pass):
    """Sums checksums of the batch over the ranks that share a model.

    Before: a graph partitioned over ranks that need the same rows. After: the graph takes a
    `BatchChecksum` and returns its `ChecksumSum` over the axes. The sums are the first collectives
    of the forward. Tier: exact.
    """

    axes: tuple[str, ...]

    def __call__(self, graph: TrainingGraph) -> PassResult:
        if next(graph.calls(), None) is None:
            return PassResult(graph, "nothing is computed")
        return PassResult(sum_batch_checksums(graph.copy(), self.axes, "_".join(self.axes)))


def sum_batch_checksums(graph: TrainingGraph, axes: Sequence[str], name: str) -> TrainingGraph:
    """Writes the sum of the `BatchChecksum` of a name, axis by axis, before the forward."""
    fake = fake_like(graph, (CHECKSUM_SIZE,), torch.float64)
    graph, total = add_input(graph, BatchChecksum(name), f"evidence_{name}".rstrip("_"), fake)
    total.meta |= {"phase": "forward", "batch_dims": ((),), "placement": Partial()}
    placement = Varying() if name else Replicate()  # placements are along the data axis
    first = next(iter(graph.calls()), graph.output_node)
    like = first if first.op == "call_function" else total
    graph.graph.inserting_before(first)
    for axis in axes:
        (total,) = collective(graph.graph, like, start_all_reduce, [total], axis)
        annotate([total], phase="forward", batch_dims=((),), placement=placement)
    return graph.with_results({ChecksumSum(name): total})
