"""Process groups by their ranks: made once, shared by all meshes over them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar._torch import abort_group, clear_dtensor_caches, group_timeout
from autopar.core.common.groups import backend_of
from autopar.core.common.world import is_part, world

Ranks = tuple[tuple[int, ...], ...]
"""Disjoint groups that cover the world, of ranks as torch.distributed numbers them."""

Groups = weakref.WeakValueDictionary[tuple[str, Ranks], dist.ProcessGroup]

_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Groups]] = weakref.WeakKeyDictionary()
"""Groups of each world: those that stay, then those of `temporary_groups`. torch keeps them."""


def _current() -> list[Groups]:
    return _KNOWN.setdefault(world(), [Groups()])


def group_of(device: torch.device, ranks: Ranks) -> dist.ProcessGroup:
    """The one of these groups with this rank; all ranks call this at once.

    The group of all ranks is the default one, except inside `temporary_groups`.
    """
    levels = _current()
    if len(ranks) == 1 and len(levels) == 1:
        return world()
    key, known = (device.type, ranks), levels[-1]
    group = known.get(key)
    if group is None:
        backend, timeout = backend_of(device), group_timeout(world())
        # new_group waits for all running ranks, and those outside of this world make none now
        local = is_part()
        own = [each for each in ranks if dist.get_rank() in each] if local else ranks
        made = [
            dist.new_group(list(each), timeout, backend, use_local_synchronization=local)
            for each in own
        ]
        (group,) = (each for each in made if isinstance(each, dist.ProcessGroup))
        known[key] = group
    return group


def mesh_over(device: torch.device, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of a tensor of all ranks, with a name for each dim; all ranks call this at once."""
    groups = []
    for dim, size in enumerate(ranks.shape):
        rows = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups.append(group_of(device, tuple(sorted(map(tuple, rows)))))
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device.type, ranks.contiguous(), mesh_dim_names=names)


@contextlib.contextmanager
def temporary_groups() -> Iterator[None]:
    """Groups made inside serve nothing else, and are destroyed at the end on all ranks."""
    levels = _current()
    levels.append(Groups())
    try:
        yield
    finally:
        for group in list(levels.pop().values()):
            dist.destroy_process_group(group)
        clear_dtensor_caches()  # these know meshes of the groups


def abort_temporary_groups() -> None:
    """Ends this rank's part in the current temporary groups, so that no other rank waits for it.

    gloo closes its connections only when nothing refers to the groups any more.
    """
    groups = _current()[-1]
    while groups:
        abort_group(groups.popitem()[1])
    clear_dtensor_caches()
    gc.collect()
