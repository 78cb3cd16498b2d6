"""Graphs of one slice of a batch, from a capture of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture.call import Call, batch_shard_of, flattened
from autopar.capture.cuda_autocast import autocast_for
from autopar.capture.model_info import describe_parameters, device_of
from autopar.capture.trace import Capture, capture
from autopar.core.ir.batch_slicing import BatchSlices
from autopar.core.ir.graph import TrainingGraph, render_node, source_line, tensors
from autopar.core.ir.roles import Output
from autopar.errors import CoupledRowsError
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.local_batch import LocalBatch
from autopar.passes.data_parallel.partition_batch import PartitionBatch
from autopar.passes.pipeline_parallel.accumulate_micro_batches import AccumulateMicroBatches

CaptureCache = dict[Any, Capture]
"""Captures of one model, by the key of the call."""


def capture_slice(
    capture: Callable[[Call], Capture],
    call: Call,
    slices: BatchSlices,
    *,
    local: bool = False,
    gathers_rows: bool = False,
    proves_rows: bool = False,
) -> Capture:
    """Captures a call on the whole batch, then partitions its graph along the batch dims.

    The call has the rows of its slice. `local` slices are independent, as under
    DistributedDataParallel. With `gathers_rows`, a model that returns rows and no scalar returns
    those of the whole batch. With `proves_rows`, other rows than the call's must train alike.

    Raises:
        BatchError: they do not.
        CaptureError: the call cannot be captured.
        CoupledRowsError: micro-batches need each other's rows before all forwards have run.
    """
    if slices.count == 1:
        return capture(call)
    made = capture(call if local else call.with_batch_size(slices.rows))

    output_dims = _output_dims(call)

    def partitioned(own: BatchSlices) -> TrainingGraph:
        if local:
            return run_passes(made.graph, [LocalBatch(own, call.row_dims)])
        written = tuple(sorted(made.assigned_outputs))
        # micro-batches end at different times, and whoever reads rows beside a loss waits for them
        gathers = gathers_rows and not own.over_time and not _returns_scalar(made.graph)
        return run_passes(
            made.graph,
            [PartitionBatch(own, call.row_dims, written, gathers, proves_rows, output_dims)],
        )

    graph = partitioned(slices)
    if slices.over_time:
        # Slices of other sizes differ in shapes, which are all that a program may depend on.
        if (other := slices.next_alike) != slices:
            _check_same_program(graph, partitioned(other))
        # The pass runs for its error alone: whoever captures can still take one micro-batch.
        run_passes(graph, [AccumulateMicroBatches()])
    return replace(made, graph=graph)


def _output_dims(call: Call) -> tuple[int | None, ...] | None:
    """The dim of each gradient that a call returns which is the batch's; None for other calls."""
    if not call.derivatives:
        return None
    inputs = call.derivatives[-1].inputs
    return tuple(call.row_dims[key] if isinstance(key, int) else None for key in inputs)


def _returns_scalar(graph: TrainingGraph) -> bool:
    """Whether an output is a number that may be a loss."""
    values = (
        tensors(node)[0]
        for role, node in zip(graph.outputs, graph.results, strict=True)
        if isinstance(role, Output) and node is not None
    )
    return any(value.dim() == 0 and value.is_floating_point() for value in values)


def _check_same_program(graph: TrainingGraph, other: TrainingGraph) -> None:
    """Raises CoupledRowsError if an operator depends on the index of the micro-batch."""
    for node, twin in zip(graph.graph.nodes, other.graph.nodes, strict=True):
        if render_node(node) != render_node(twin):
            line = source_line(node)
            raise CoupledRowsError(
                f"{node.target} depends on where a micro-batch stands in the batch"
                + (f" ({line})" if line else "")
                + ", so micro-batches cannot share a program: give Strategy(micro_batches=1)"
            )


def capture_of_rank(
    model: nn.Module,
    example_inputs: Any,
    rank: int,
    ranks: int,
    batch: str = "global",
    autocast: torch.dtype | None = None,
    loss_fn: Callable[..., Any] | None = None,
    micro_batches: int = 1,
    cache: CaptureCache | None = None,
    local: bool = False,
    in_time: bool = False,
    comm_backend: str = "gloo",
    gathers_rows: bool = False,
    even: bool = False,
) -> TrainingGraph:
    """The joint graph of the first micro-batch of a data parallel rank, without running it.

    The model may be on the meta device. The inputs hold the rows of all ranks under `batch`
    "global", one rank's rows under "local". `cache` holds captures to reuse, and is extended.
    Under `local`, a rank computes on its own rows alone (`batch_semantics`). Under `in_time`, the
    ranks are micro-batches that run in sequence. Autocast is that of GPUs if `comm_backend` is.
    `gathers_rows` is that of `capture_slice`, and `even` that of `BatchShard.split_micro_batches`.

    Raises:
        BatchError: the rows cannot be divided into that many ranks and micro-batches.
        CaptureError: the model cannot be captured.
        CoupledRowsError: micro-batches need each other's rows before all forwards have run.
    """
    captures = {} if cache is None else cache
    device, parameters = device_of(model), describe_parameters(model)
    leaves, structure = flattened(example_inputs)
    shard = batch_shard_of(leaves, structure, mode=batch, rank=rank, ranks=ranks, strict=True)
    shard = shard.split_micro_batches(micro_batches, even)[0]
    slices = replace(shard.slices, over_time=shard.slices.over_time or in_time)

    def capture_once(call: Call) -> Capture:
        if call.key not in captures:
            with autocast_for(device, autocast, comm_backend):
                captures[call.key] = capture(
                    model, call, parameters, device=device, loss_fn=loss_fn
                )
        return captures[call.key]

    return capture_slice(
        capture_once, shard.call, slices, local=local, gathers_rows=gathers_rows
    ).graph
