"""`capture_slice`: the graph of one slice of a batch, from a capture of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar._torch import pytree
from autopar.capture.call import Call
from autopar.capture.trace import Capture
from autopar.errors import CoupledRowsError
from autopar.ir.batch_slicing import BatchSlices
from autopar.ir.graph import TrainingGraph, render_node, source_line
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.local_batch import LocalBatch
from autopar.passes.data_parallel.partition_batch import PartitionBatch
from autopar.passes.pipeline_parallel.accumulate_micro_batches import AccumulateMicroBatches

CaptureCall = Callable[[Call], Capture]
"""Captures a call."""


def capture_slice(
    capture: CaptureCall, call: Call, slices: BatchSlices, *, local: bool = False
) -> Capture:
    """Captures one slice of a batch.

    Captures the call on the whole batch, then partitions its graph along the batch dims.

    Args:
        capture: captures a call.
        call: the call with the rows of this slice.
        slices: number of slices of the batch, and the index of this one.
        local: whether slices are independent, as under DistributedDataParallel.

    Raises:
        CaptureError: the call cannot be captured.
        CoupledRowsError: micro-batches need each other's rows before all forwards have run.
    """
    if slices.count == 1:
        return capture(call)
    made = capture(call if local else call.with_batch_size(slices.rows))

    def partitioned(own: BatchSlices) -> TrainingGraph:
        if local:
            return run_passes(made.graph, [LocalBatch(own, call.has_batch_dim)])
        kept = tuple(sorted(written_outputs(made)))
        return run_passes(made.graph, [PartitionBatch(own, call.has_batch_dim, kept)])

    graph = partitioned(slices)
    if slices.over_time:
        if slices.is_even:
            check_same_program(graph, partitioned(replace(slices, index=slices.index ^ 1)))
        run_passes(graph, [AccumulateMicroBatches()])
    return replace(made, graph=graph, batch_graph=made.graph)


def written_outputs(capture: Capture) -> set[int]:
    """Outputs that every call writes to attributes of the model."""
    if not capture.writes:
        return set()
    indices = pytree.tree_unflatten(list(range(len(capture.leaves))), capture.structure)[1]
    return set(pytree.tree_leaves(indices))


def check_same_program(graph: TrainingGraph, other: TrainingGraph) -> None:
    """Checks that two micro-batches of a rank run the same program.

    Raises:
        CoupledRowsError: an operator depends on the index of the micro-batch.
    """
    for node, twin in zip(graph.graph.nodes, other.graph.nodes, strict=True):
        if render_node(node) != render_node(twin):
            line = source_line(node)
            raise CoupledRowsError(
                f"{node.target} depends on where a micro-batch stands in the batch"
                + (f" ({line})" if line else "")
                + ", so micro-batches cannot share a program: give Strategy(micro_batches=1)"
            )
