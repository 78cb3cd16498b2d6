"""Process groups and device meshes."""

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
    """The number of ranks; initializes torch.distributed if torchrun launched this process.

    Raises:
        StrategyError: another number of ranks is running.
    """
    initialized = dist.is_available() and dist.is_initialized()
    launched = not initialized and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    running = dist.get_world_size() if initialized else 1
    if launched:
        running = int(os.environ["WORLD_SIZE"])
    if world_size is not None and world_size != running:
        what = "but this is one process outside of torchrun. Launch"
        if running > 1:
            what = f"but {running} ranks are running. Leave world_size out, or launch"
        launch = LAUNCH_COMMAND.format(n=world_size)
        raise StrategyError(f"world_size={world_size}, {what} with: {launch}")
    if launched and running > 1:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
    return running


def make_mesh(
    device: torch.device, axes: tuple[tuple[str, int], ...], shard_order: Sequence[str] = ()
) -> DeviceMesh | None:
    """The mesh of all axes with more than one rank, None for a single rank."""
    sizes = dict(axes)
    names = [name for name in shard_order or sizes if sizes.get(name, 1) > 1]
    if not names:
        return None
    nontrivial = [name for name in sizes if sizes[name] > 1]
    ranks = torch.arange(math.prod(sizes.values())).view([sizes[name] for name in nontrivial])
    ranks = ranks.permute([nontrivial.index(name) for name in names])
    return DeviceMesh(device.type, ranks.contiguous(), mesh_dim_names=tuple(names))


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
def explaining_comm_errors(operation: str) -> Iterator[None]:
    """Raises CommunicationError with the rank and the usual cause for a failed collective."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        signs = ("Connection", "connection", "Timed out", "timed out", "gloo", "NCCL", "peer")
        if isinstance(error, torch.OutOfMemoryError) or not any(s in text for s in signs):
            raise
        raise CommunicationError(
            f"rank {rank()}: a collective failed in {operation}: another rank died, raised "
            "an error or left. Look for the first error among all ranks' output. "
            f"({text.splitlines()[0]})"
        ) from error
