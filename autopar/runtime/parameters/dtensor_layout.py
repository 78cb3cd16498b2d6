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
from autopar.core.ir.placement import Placement, Shard, chunk_rows

Layout = Mapping[str, Placement]
"""Placement of a parameter on each axis, by name."""


def torch_placements(layout: Layout, mesh: DeviceMesh) -> tuple[Any, ...]:
    """DTensor's placement for each axis of a mesh."""
    found: list[Any] = []
    for name in mesh.mesh_dim_names or ():
        placement = layout[name]
        if not isinstance(placement, Shard):
            found.append(TorchReplicate())
        elif placement.interleave == 1:
            found.append(TorchShard(placement.dim))
        else:
            found.append(StridedShard(placement.dim, split_factor=placement.interleave))
    return tuple(found)


def is_sharded(placement: Any) -> bool:
    """Whether a DTensor placement shards a dim, interleaved or not."""
    return isinstance(placement, (TorchShard, StridedShard))


def local_shard(
    tensor: torch.Tensor, placement: Any, rank: int, ranks: int, dim: int | None = None
) -> torch.Tensor:
    """A rank's shard; the last ones may be smaller."""
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
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
