"""Process groups and device meshes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.common.groups import advice_for_hangs
from autopar.core.common.world import running_ranks
from autopar.core.ir.mesh_levels import mesh_of
from autopar.errors import CommunicationError
from autopar.runtime.group_cache import mesh_over
from autopar.runtime.lost_peers import is_lost_peer
from autopar.runtime.watch.hang import where_ranks_are


def make_mesh(
    device: torch.device, axes: tuple[tuple[str, int], ...], shard_order: Sequence[str] = ()
) -> DeviceMesh | None:
    """The mesh of all axes with more than one rank, None for a single rank."""
    sizes = dict(axes)
    names = [name for name in shard_order or sizes if sizes.get(name, 1) > 1]
    if not names:
        return None
    nontrivial = [name for name in sizes if sizes[name] > 1]
    ranks = torch.tensor(running_ranks(range(math.prod(sizes.values()))))
    ranks = ranks.view([sizes[name] for name in nontrivial])
    ranks = ranks.permute([nontrivial.index(name) for name in names])
    return mesh_over(device, ranks, tuple(names))


def make_groups(
    device: torch.device, axes: Mapping[str, int], mesh: DeviceMesh | None
) -> dict[str, str]:
    """The name of the process group of each axis and level; all ranks call this at once."""
    found = _group_names(mesh)
    for name, size in axes.items():
        if size > 1 and name not in found:
            level_mesh = make_mesh(device, tuple(mesh_of(name, axes).items()))
            found = _group_names(level_mesh) | found
    return found


def _group_names(mesh: DeviceMesh | None) -> dict[str, str]:
    if mesh is None:
        return {}
    return {name: mesh.get_group(name).group_name for name in mesh.mesh_dim_names or ()}


@contextlib.contextmanager
def explaining_comm_errors(operation: str) -> Iterator[None]:
    """Raises CommunicationError with the rank and the usual cause for a failed collective."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        raise CommunicationError(
            f"a collective failed in {operation}: {where_ranks_are()}. Perhaps another rank died, "
            "raised an error or left. Look for the first error among all ranks' output. "
            f"({str(error).splitlines()[0]}){advice_for_hangs()}"
        ) from error
