"""Layouts of parameters as DTensor placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from autopar._torch import StridedShard
from autopar.ir.placement import Placement, Shard, chunk_rows

Layout = Mapping[str, Placement]
"""Placement of a parameter on each axis, by name."""


def torch_placements(layout: Layout, mesh: DeviceMesh) -> tuple[Any, ...]:
    """DTensor's placement for each axis of a mesh."""
    return tuple(_torch_placement(layout[name]) for name in mesh.mesh_dim_names or ())


def _torch_placement(placement: Placement) -> Any:
    if not isinstance(placement, Shard):
        return TorchReplicate()
    if placement.interleave == 1:
        return TorchShard(placement.dim)
    return StridedShard(placement.dim, split_factor=placement.interleave)


def distribute_replicated(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]
) -> DTensor:
    """A DTensor of a tensor that every rank has whole, without communication."""
    part = tensor
    for axis, placement in enumerate(placements):
        if is_sharded(placement):
            part = local_shard(part, placement, mesh.get_local_rank(axis), mesh.size(axis))
    return dtensor_from_local(part.contiguous().clone(), mesh, placements, tensor.shape)


def is_sharded(placement: Any) -> bool:
    """Whether a DTensor placement shards a dim, interleaved or not."""
    return isinstance(placement, (TorchShard, StridedShard))


def local_shard(
    tensor: torch.Tensor, placement: Any, rank: int, ranks: int, dim: int | None = None
) -> torch.Tensor:
    """A rank's shard; the last ones may be smaller.

    Args:
        tensor: the unsharded tensor.
        placement: DTensor placement that shards a dim.
        rank: index on the axis.
        ranks: size of the axis.
        dim: dim to shard instead of the placement's.
    """
    dim = placement.dim if dim is None else dim
    count = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
    parts = []
    for piece in tensor.chunk(count, dim):
        sizes = chunk_rows(piece.shape[dim], ranks)
        parts.append(piece.narrow(dim, sum(sizes[:rank]), sizes[rank]))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def dtensor_from_local(
    part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size
) -> DTensor:
    """A contiguous DTensor of the global `shape` around this rank's part."""
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return DTensor.from_local(
        part,
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=tuple(reversed(stride))[: len(shape)],
    )
