"""Process groups and the mesh of ranks that a plan names."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import CommunicationError, StrategyError
from autopar.ir.mesh_levels import mesh_of

LAUNCH_COMMAND = "autopar run SCRIPT --nproc {n}   (or: torchrun --nproc-per-node {n} SCRIPT)"


def ensure_process_group(world_size: int | None, timeout_s: float) -> int:
    """Initialises torch.distributed from torchrun's environment if nobody has.

    Returns:
        The number of ranks: 1 without a process group.

    Raises:
        StrategyError: `world_size` contradicts what is running.
    """
    running = 1
    if dist.is_available() and dist.is_initialized():
        running = dist.get_world_size()
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        running = int(os.environ["WORLD_SIZE"])
        if world_size is not None and world_size != running:
            raise _contradiction(world_size, running)
        if running > 1:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            if backend == "nccl":
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    if world_size is not None and world_size != running:
        raise _contradiction(world_size, running)
    return running


def _contradiction(world_size: int, running: int) -> StrategyError:
    if running == 1:
        return StrategyError(
            f"world_size={world_size}, but this is one process outside of torchrun. "
            f"Launch with: {LAUNCH_COMMAND.format(n=world_size)}"
        )
    return StrategyError(
        f"world_size={world_size}, but {running} ranks are running. Leave world_size out, or "
        f"launch with: {LAUNCH_COMMAND.format(n=world_size)}"
    )


def make_mesh(
    device: torch.device, axes: tuple[tuple[str, int], ...], shard_order: Sequence[str] = ()
) -> DeviceMesh | None:
    """The mesh of a plan's axes of more than one rank; None for one rank.

    Args:
        device: of the tensors.
        axes: names and sizes; the last is that of neighbours.
        cuts: the order in which parameters are cut along them, by default theirs. The mesh names
            them so, since a DTensor's placements are read from left to right. Others than theirs
            are left out.
    """
    sizes = dict(axes)
    names = [name for name in shard_order or sizes if sizes.get(name, 1) > 1]
    if not names:
        return None
    kept = [name for name in sizes if sizes[name] > 1]
    ranks = torch.arange(math.prod(sizes.values())).view([sizes[name] for name in kept])
    ranks = ranks.permute([kept.index(name) for name in names])
    return DeviceMesh(device.type, ranks.contiguous(), mesh_dim_names=tuple(names))


def make_groups(
    device: torch.device, axes: Mapping[str, int], mesh: DeviceMesh | None
) -> dict[str, str]:
    """The process group behind each axis and level, as functional collectives name it.

    All ranks call this at once.

    Args:
        device: of the tensors.
        axes: sizes of axes, the last that of neighbours, and of their levels.
        mesh: whose groups are there already.
    """
    found = group_names(mesh)
    for name, size in axes.items():
        if size > 1 and name not in found:
            others = make_mesh(device, tuple(mesh_of(name, axes).items()))
            found = group_names(others) | found
    return found


def group_names(mesh: DeviceMesh | None) -> dict[str, str]:
    """The process group behind each axis of a mesh, as functional collectives name it."""
    if mesh is None:
        return {}
    names = mesh.mesh_dim_names or ()
    return {name: mesh.get_group(name).group_name for name in names}


def backend_of(device: torch.device) -> str:
    """The torch.distributed backend for tensors of a device."""
    if not (dist.is_available() and dist.is_initialized()):
        return "gloo" if device.type == "cpu" else "nccl"
    name = str(dist.get_backend())
    return "gloo" if device.type == "cpu" and ":" in name else name


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextlib.contextmanager
def explaining_comm_errors(what: str) -> Iterator[None]:
    """Says which rank saw a collective fail, and what that usually means."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        signs = ("Connection", "connection", "Timed out", "timed out", "gloo", "NCCL", "peer")
        if isinstance(error, torch.OutOfMemoryError) or not any(s in text for s in signs):
            raise
        raise CommunicationError(
            f"rank {rank()}: a collective failed in {what}: another rank died, raised an error or "
            f"left. Look for the first error among all ranks' output. ({text.splitlines()[0]})"
        ) from error
