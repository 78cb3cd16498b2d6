"""`capture_of_rank`: the graph of a rank that need not be running."""

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

Known = dict[Any, Capture]
"""Captures of one model, by call."""


def capture_of_rank(
    model: nn.Module,
    example_inputs: Any,
    rank: int,
    ranks: int,
    batch: str,
    autocast: torch.dtype | None,
    loss_fn: Callable[..., Any] | None,
    micro_batches: int = 1,
    known: Known | None = None,
    local: bool = False,
    in_time: bool = False,
) -> TrainingGraph:
    """The joint graph of a micro-batch of a rank that need not be running.

    What is `known` of calls of this batch is not captured again, and what is captured becomes so.
    With `local`, the rank computes what it would of its own rows alone (`batch_semantics`). With
    `in_time`, ranks stand for micro-batches that pass one after the other.
    """
    known = {} if known is None else known
    device = device_of(model)
    leaves, structure = flattened(example_inputs)
    share = batch_shard_of(leaves, structure, mode=batch, rank=rank, ranks=ranks)
    share = share.split_micro_batches(micro_batches)[0]
    share = replace(share, in_time=share.in_time or in_time)
    parameters = describe_parameters(model)

    def attempt(call: Call) -> Capture:
        if call.key not in known:
            with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                known[call.key] = capture(model, call, parameters, device=device, loss_fn=loss_fn)
        return known[call.key]

    return capture_slice(attempt, share.call, share.slices, local=local).graph


def flattened(example_inputs: Any) -> tuple[list[Any], Any]:
    """Example inputs as the flattened (args, kwargs) of a call."""
    args: tuple[Any, ...]
    if isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        args, kwargs = tuple(example_inputs), {}
    else:
        args, kwargs = (example_inputs,), {}
    leaves, structure = flatten((args, kwargs))
    check_no_hidden_tensors(leaves)
    return leaves, structure
