"""What torch's DTensor lacks for interleaved shards: the whole of them, and checkpoints.

Of a DTensor torch.distributed.checkpoint writes one chunk, at the first offset of the local part.
An interleaved shard holds several pieces of the whole, and all but the first would be written to
the wrong place: so it is given a chunk for each. And torch gathers an interleaved shard only along
the last axis of a mesh: so axes are gathered one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor that is contiguous in the whole.

    Attributes:
        offsets: where it begins in the whole, by dim.
        begins: where it begins in the local part, by dim.
        sizes: of it, by dim.
    """

    offsets: torch.Size
    begins: tuple[int, ...]
    sizes: torch.Size

    @property
    def stored(self) -> ChunkStorageMetadata:
        """The chunk as a checkpoint describes it."""
        return ChunkStorageMetadata(self.offsets, self.sizes)

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """A view of it in the local part."""
        for dim, (begin, size) in enumerate(zip(self.begins, self.sizes, strict=True)):
            part = part.narrow(dim, begin, size)
        return part


def chunks(tensor: DTensor) -> list[Chunk]:
    """The chunks that this rank holds of a tensor."""
    runs = [list(_runs(tensor, dim)) for dim in range(tensor.dim())]
    found = []
    for places in product(*runs):
        offsets, begins, sizes = zip(*places, strict=True)
        found.append(Chunk(torch.Size(offsets), begins, torch.Size(sizes)))
    return found


def _runs(tensor: DTensor, dim: int) -> Iterator[tuple[int, int, int]]:
    """Where each contiguous run of a dim begins in the whole and in the local part; its size."""
    indices = torch.arange(tensor.shape[dim])
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if is_sharded(placement) and placement.dim == dim:  # type: ignore[attr-defined]
            rank, ranks = mesh.get_local_rank(axis), mesh.size(axis)
            indices = local_shard(indices, placement, rank, ranks, dim=0)
    held: list[int] = indices.tolist()
    breaks = [i for i, (a, b) in enumerate(pairwise(held), 1) if b != a + 1]
    for begin, end in pairwise([0, *breaks, len(held)] if held else []):
        yield held[begin], begin, end - begin


def write_items(tensor: DTensor, name: str) -> list[WriteItem]:
    """What a checkpoint writes of a tensor on this rank."""
    properties = TensorProperties.create_from_tensor(tensor.to_local())
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk.stored, properties, tensor.size()),
        )
        for chunk in chunks(tensor)
    ]


def shard_at(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The part of a tensor that a checkpoint writes or reads under an index."""
    for chunk in chunks(tensor):
        if chunk.offsets == index.offset:
            return chunk.of(tensor.to_local())
    raise ValueError(f"this rank holds nothing of {index.fqn} at {index.offset}")


def full_tensor(tensor: DTensor, **options: Any) -> torch.Tensor:
    """The whole of a tensor, gathered along its axes from the last one to be cut to the first."""
    part, mesh = tensor.to_local(), tensor.device_mesh
    for axis in reversed(range(mesh.ndim)):
        shape = _shape_before(tensor, axis)
        own = mesh[(mesh.mesh_dim_names or ())[axis]]
        placement = tensor.placements[axis]
        part = dtensor_from_local(part, own, [placement], shape).full_tensor(**options)
    return part


def _shape_before(tensor: DTensor, axis: int) -> torch.Size:
    """The shape of what the ranks of an axis hold parts of."""
    shape = list(tensor.shape)
    for other, placement in enumerate(tensor.placements[:axis]):
        if is_sharded(placement):
            dim: int = placement.dim  # type: ignore[attr-defined]
            rank, ranks = tensor.device_mesh.get_local_rank(other), tensor.device_mesh.size(other)
            shape[dim] = local_shard(torch.empty(shape[dim]), placement, rank, ranks, dim=0).shape[
                0
            ]
    return torch.Size(shape)


def register_strided_shard_support() -> None:
    """Gives DTensor what it lacks for interleaved shards, once in a process."""
    _extend("full_tensor", full_tensor)
    _extend("__create_write_items__", lambda tensor, name, _: write_items(tensor, name))
    _extend("__create_chunk_list__", lambda tensor: [chunk.stored for chunk in chunks(tensor)])
    _extend("__get_tensor_shard__", shard_at)


def _extend(name: str, interleaved: Callable[..., Any]) -> None:
    """Gives DTensor another method for tensors with interleaved shards."""
    plain = getattr(DTensor, name)
    if hasattr(plain, "__wrapped__"):
        return

    def method(tensor: DTensor, *args: Any, **options: Any) -> Any:
        strided = any(isinstance(p, StridedShard) for p in tensor.placements)
        several = tensor.device_mesh.ndim > 1 or name != "full_tensor"
        how = interleaved if strided and several else plain
        return how(tensor, *args, **options)

    method.__wrapped__ = plain  # type: ignore[attr-defined]
    setattr(DTensor, name, method)
