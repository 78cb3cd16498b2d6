"""Backends of process groups, and the group that carries objects and CPU tensors."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from autopar._torch import group_timeout
from autopar.core.common.world import world

T = TypeVar("T")

_BESIDE: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_BESIDE = weakref.WeakKeyDictionary()
"""The gloo group beside each group that carries no CPU tensors; torch destroys both."""


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Backends of a group, the default one for None, by type of device."""
    pairs = (part.partition(":") for part in dist.get_backend_config(group).split(","))
    return {device: backend for device, _, backend in pairs}


def backend_of(device: torch.device) -> str:
    """The torch.distributed backend for tensors of a device."""
    default = "gloo" if device.type == "cpu" else "nccl"
    if not (dist.is_available() and dist.is_initialized()):
        return default
    return backends_of().get(device.type, default)


def gloo_group(beside: dist.ProcessGroup, *, use: str) -> dist.ProcessGroup:
    """A new group of the same ranks for CPU tensors; fake beside a fake one.

    All its ranks call this at once. `use` names the group for debugging.
    """
    is_world = beside is dist.group.WORLD
    group = dist.new_group(
        None if is_world else dist.get_process_group_ranks(beside),
        backend="fake" if dist.get_backend(beside) == "fake" else "gloo",
        timeout=group_timeout(beside),
        # By default new_group waits for all running ranks; only those of this group call it.
        use_local_synchronization=not is_world,
        group_desc=f"autopar: {use}",
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def cpu_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """The group, or a gloo group beside it if it carries no CPU tensors; None is the world.

    All its ranks call this at once.
    """
    group = group or world()
    if "cpu" in backends_of(group):
        return group
    known = _BESIDE.get(group)
    beside = None if known is None else known()
    if beside is None:
        beside = gloo_group(group, use="objects")
        _BESIDE[group] = weakref.ref(beside)
    return beside


def gather_values(value: T, group: dist.ProcessGroup) -> list[T]:
    """The value of each rank of a group that carries CPU tensors, by rank; all call this at once.

    Values travel by pickle.
    """
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def has_ended(work: dist.Work) -> bool:
    """Whether a collective of gloo has ended, without waiting for it.

    `work.is_completed()` waits for the thread of gloo that ends the work, and holds Python's lock
    meanwhile. Under a profiler that thread may need the lock, where a loop has hooks on saved
    tensors: neither ever goes on.
    """
    return bool(work.get_future().done())


def advice_for_hangs() -> str:
    """A sentence on NCCL's flight recorder; empty where NCCL carries nothing."""
    if not dist.is_initialized() or "nccl" not in backends_of().values():
        return ""
    return (
        " If a rank hangs in NCCL, run again with TORCH_FR_BUFFER_SIZE=2000 "
        "(TORCH_NCCL_TRACE_BUFFER_SIZE in older torch) and TORCH_NCCL_DUMP_ON_TIMEOUT=1, and read "
        "the dumps with torchfrtrace: they name the collective that each rank waits in."
    )
