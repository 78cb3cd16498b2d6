"""Where parameters lie, as DTensors have it: a placement for each axis, in the order of cutting."""

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
"""How a parameter lies along each axis, by name."""


def torch_placements(layout: Layout, mesh: DeviceMesh) -> tuple[Any, ...]:
    """A layout as DTensor has it, for each axis of a mesh."""
    return tuple(_torch_placement(layout[name]) for name in mesh.mesh_dim_names or ())


def _torch_placement(placement: Placement) -> Any:
    if not isinstance(placement, Shard):
        return TorchReplicate()
    if placement.interleave == 1:
        return TorchShard(placement.dim)
    return StridedShard(placement.dim, split_factor=placement.interleave)


def distribute_replicated(
    whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]
) -> DTensor:
    """What is whole on every rank, as a DTensor of this rank's part."""
    part = whole
    for axis, placement in enumerate(placements):
        if is_sharded(placement):
            part = local_shard(part, placement, mesh.get_local_rank(axis), mesh.size(axis))
    return dtensor_from_local(part.contiguous().clone(), mesh, placements, whole.shape)


def is_sharded(placement: Any) -> bool:
    """Whether a placement of DTensor cuts a dim, in one piece or several."""
    return isinstance(placement, (TorchShard, StridedShard))


def local_shard(
    tensor: torch.Tensor, placement: Any, rank: int, ranks: int, dim: int | None = None
) -> torch.Tensor:
    """A rank's shard, of another dim if one is given; the last ones may be smaller."""
    dim = placement.dim if dim is None else dim
    pieces = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
    parts = []
    for piece in tensor.chunk(pieces, dim):
        sizes = chunk_rows(piece.shape[dim], ranks)
        parts.append(piece.narrow(dim, sum(sizes[:rank]), sizes[rank]))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0]


def dtensor_from_local(
    part: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: torch.Size
) -> DTensor:
    """A DTensor of a shape around this rank's part."""
    return DTensor.from_local(
        part,
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=_contiguous_stride(shape),
    )


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.append(stride[-1] * max(size, 1))
    return tuple(reversed(stride))[: len(shape)]
