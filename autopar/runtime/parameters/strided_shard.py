"""Support for interleaved shards that torch's DTensor lacks: gathering and checkpoints.

torch.distributed.checkpoint writes a DTensor's local part as one chunk, but an interleaved shard
consists of several. torch gathers interleaved shards only along the last axis of a mesh, so
`full_tensor` here gathers axis by axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autopar._torch import StridedShard
from autopar.runtime.parameters.dtensor_layout import dtensor_from_local, is_sharded, local_shard


def chunks(tensor: DTensor) -> Iterator[tuple[ChunkStorageMetadata, torch.Tensor]]:
    """The blocks of the local part that are contiguous in the full tensor, as views."""
    for block in product(*(list(_runs(tensor, dim)) for dim in range(tensor.dim()))):
        part = tensor.to_local()
        for dim, (_, begin, size) in enumerate(block):
            part = part.narrow(dim, begin, size)
        offsets, _, sizes = zip(*block, strict=True)
        yield ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), part


def _runs(tensor: DTensor, dim: int) -> Iterator[tuple[int, int, int]]:
    """Each contiguous run of a dim: offset in the full tensor, offset in the local part, size."""
    local: list[int] = _indices(tensor, dim, tensor.device_mesh.ndim).tolist()
    breaks = [i for i, (a, b) in enumerate(pairwise(local), 1) if b != a + 1]
    for begin, end in pairwise([0, *breaks, len(local)] if local else []):
        yield local[begin], begin, end - begin


def _indices(tensor: DTensor, dim: int, axes: int) -> torch.Tensor:
    """The indices of a dim that this rank has, sharded along the first `axes` axes alone."""
    indices, mesh = torch.arange(tensor.shape[dim]), tensor.device_mesh
    for axis, placement in enumerate(tensor.placements[:axes]):
        if is_sharded(placement) and placement.dim == dim:  # type: ignore[attr-defined]
            rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
            indices = local_shard(indices, placement, rank, ranks, dim=0)
    return indices


def write_items(tensor: DTensor, name: str) -> list[WriteItem]:
    """The items that a checkpoint writes on this rank."""
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, tensor.size()),
        )
        for chunk, _ in chunks(tensor)
    ]


def shard_at(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The view that a checkpoint writes or reads at an index; ValueError if there is none."""
    for chunk, part in chunks(tensor):
        if chunk.offsets == index.offset:
            return part
    raise ValueError(f"this rank holds nothing of {index.fqn} at {index.offset}")


def full_tensor(tensor: DTensor, **options: Any) -> torch.Tensor:
    """The unsharded tensor, gathered along its axes from the last to the first."""
    part, mesh = tensor.to_local(), tensor.device_mesh
    # Later axes divide the shards of earlier ones, so that the last axis is gathered first.
    for axis in reversed(range(mesh.ndim)):
        shape = torch.Size(len(_indices(tensor, dim, axis)) for dim in range(tensor.dim()))
        axis_mesh = mesh[(mesh.mesh_dim_names or ())[axis]]
        placement = tensor.placements[axis]
        part = dtensor_from_local(part, axis_mesh, [placement], shape).full_tensor(**options)
    return part


def whole_tensor(value: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor of a DTensor; a plain tensor as it is.

    torch warns of sequential gathers if it gathers along several axes.
    """
    if not isinstance(value, DTensor):
        return value
    return full_tensor(value) if value.device_mesh.ndim > 1 else value.full_tensor()


def register_strided_shard_support() -> None:
    """Extends DTensor for interleaved shards, once in a process."""
    _extend("full_tensor", full_tensor)
    _extend("__create_write_items__", lambda tensor, name, _: write_items(tensor, name))
    _extend("__create_chunk_list__", lambda tensor: [chunk for chunk, _ in chunks(tensor)])
    _extend("__get_tensor_shard__", shard_at)


def _extend(name: str, interleaved: Callable[..., Any]) -> None:
    """Replaces a method of DTensor for tensors with interleaved shards."""
    plain = getattr(DTensor, name)
    if hasattr(plain, "__wrapped__"):
        return

    def method(tensor: DTensor, *args: Any, **options: Any) -> Any:
        strided = any(isinstance(p, StridedShard) for p in tensor.placements)
        several = tensor.device_mesh.ndim > 1 or name != "full_tensor"
        return (interleaved if strided and several else plain)(tensor, *args, **options)

    method.__wrapped__ = plain  # type: ignore[attr-defined]
    setattr(DTensor, name, method)
