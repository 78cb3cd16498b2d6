"""Whole values of DTensors, read on all ranks at once, and this rank's parts of them."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from autopar._torch import local_tensor
from autopar.core.common.world import world
from autopar.errors import StrategyError
from autopar.runtime.agreement.channel import channel, finish_exchange
from autopar.runtime.parameters.dtensor_layout import is_sharded, local_shard
from autopar.runtime.parameters.strided_shard import whole_tensor
from autopar.runtime.process_groups import explaining_comm_errors


def has_shards(tensor: DTensor) -> bool:
    """Whether ranks have different parts of a tensor."""
    return any(map(is_sharded, tensor.placements))


def read_whole(tensor: DTensor) -> torch.Tensor:
    """The whole values of a tensor, for reading; all ranks call this at once."""
    if tensor.is_meta:
        raise StrategyError(
            f"a parameter of shape {list(tensor.shape)} lives on another stage of the pipeline, "
            "and is read here. Read and change parameters inside of `with model.gathered():`, and "
            "clip gradients by model.clip_grad_norm_()."
        )
    if not has_shards(tensor):
        return local_tensor(tensor).detach()
    if (agreement := channel()) is not None:
        agreement.exchange(f"reads a parameter or gradient of shape {list(tensor.shape)}")
    finish_exchange()
    with torch.no_grad(), explaining_comm_errors("the reading of a parameter"):
        return whole_tensor(DTensor(local_tensor(tensor), tensor._spec, requires_grad=False))


def write_whole(tensor: DTensor, whole: torch.Tensor) -> None:
    """Takes this rank's part of new values."""
    if whole.shape != tensor.shape:
        raise StrategyError(
            f"a parameter of shape {list(tensor.shape)} gets the shape {list(whole.shape)} in "
            "place. Change shapes before autopar.compile."
        )
    local_tensor(tensor).copy_(own_part(whole, tensor))


def average_of_ranks(value: torch.Tensor) -> torch.Tensor:
    """The mean of a plain tensor over all ranks, which call this at once."""
    agreement = channel()
    if agreement is None:
        return value
    agreement.exchange(f"averages a gradient of shape {list(value.shape)}")
    total = value.detach().clone(memory_format=torch.contiguous_format)
    with torch.no_grad(), explaining_comm_errors("the average of a gradient"):
        dist.all_reduce(total, group=world())
    return total / agreement.size


def own_part(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part, as `like` is laid out, of a plain tensor that broadcasts with it."""
    mesh, missing = like.device_mesh, like.dim() - value.dim()
    for axis, placement in enumerate(like.placements):
        if is_sharded(placement):
            dim = placement.dim - missing  # type: ignore[attr-defined]
            if dim >= 0 and (value.shape[dim] != 1 or like.shape[placement.dim] == 1):  # type: ignore[attr-defined]
                value = local_shard(
                    value, placement, mesh.get_local_rank(axis), mesh.size(axis), dim
                )
    return value
