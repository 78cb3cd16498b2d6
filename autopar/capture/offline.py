"""`capture_of_rank`: captures the graph of any rank, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.capture.batch_shards import batch_shard_of
from autopar.capture.batch_slices import capture_slice
from autopar.capture.call import Call
from autopar.capture.model_info import describe_parameters, device_of
from autopar.capture.trace import Capture, capture
from autopar.common.containers import check_no_hidden_tensors, flatten
from autopar.ir.graph import TrainingGraph

CaptureCache = dict[Any, Capture]
"""Captures of one model, by the key of the call."""


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
) -> TrainingGraph:
    """The joint graph of the first micro-batch of a data parallel rank.

    Args:
        model: the model, possibly on the meta device.
        example_inputs: tuple of arguments, dict of keyword arguments, or a single argument.
        rank: data parallel rank.
        ranks: number of data parallel ranks.
        batch: "global" if the inputs hold the rows of all ranks, "local" otherwise.
        autocast: dtype of autocast, None for none.
        loss_fn: loss function applied inside the graph, None for none.
        micro_batches: number of micro-batches of a rank.
        cache: captures to reuse and to extend.
        local: whether a rank computes on its own rows alone (`batch_semantics`).
        in_time: whether the ranks are micro-batches that run in sequence.

    Raises:
        BatchError: the rows cannot be divided into that many ranks and micro-batches.
        CaptureError: the model cannot be captured.
        CoupledRowsError: micro-batches need each other's rows before all forwards have run.
    """
    captures = {} if cache is None else cache
    device, parameters = device_of(model), describe_parameters(model)
    shard = batch_shard_of(*flattened(example_inputs), mode=batch, rank=rank, ranks=ranks)
    shard = shard.split_micro_batches(micro_batches)[0]
    shard = replace(shard, in_time=shard.in_time or in_time)

    def capture_once(call: Call) -> Capture:
        if call.key not in captures:
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                captures[call.key] = capture(
                    model, call, parameters, device=device, loss_fn=loss_fn
                )
        return captures[call.key]

    return capture_slice(capture_once, shard.call, shard.slices, local=local).graph


def flattened(example_inputs: Any) -> tuple[list[Any], Any]:
    """The flattened (args, kwargs) of example inputs, and their structure."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        args = tuple(example_inputs)
    else:
        args = (example_inputs,)
    leaves, structure = flatten((args, kwargs))
    check_no_hidden_tensors(leaves)
    return leaves, structure
