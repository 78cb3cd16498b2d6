"""`DeviceMemory`: what plans may fill of the GPUs of running ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

from autopar.formatting import human_bytes

COMMUNICATOR_BYTES = 600 * 2**20
"""Bytes of an NCCL communicator that was not measured; 500 to 700 MB in NVIDIA/nccl#964."""

MARGIN = 0.02
"""Share of a GPU's memory that stays free, for what the model of torch's allocator leaves out:
tensors held for other streams, and kernels that are loaded late."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the GPU with the least, among those of all ranks.

    Attributes:
        total: bytes of the device.
        free: bytes that torch has reserved or may reserve, with the world's communicator connected.
        communicator: bytes of one more communicator.
        measured: whether a communicator was connected to measure it.
    """

    total: int
    free: int
    communicator: int
    measured: bool

    @classmethod
    def here(cls) -> DeviceMemory:
        """Measures this rank's GPU; all ranks call this at once.

        Libraries of the GPU are loaded, and one communicator of all ranks is connected and
        destroyed.
        """
        _load_libraries()
        drop, connects = 0, _has_nccl()
        if connects:
            _connect(None)
            before = _own_bytes()
            group = dist.new_group(backend="nccl")
            _connect(group)
            drop = before - _own_bytes()
            dist.destroy_process_group(group)
        estimate = COMMUNICATOR_BYTES if connects else 0
        measured = drop > 0 or not connects
        return cls(
            total=torch.cuda.mem_get_info()[1],
            free=_own_bytes(),
            communicator=drop if drop > 0 else estimate,
            measured=measured,
        )

    @staticmethod
    def least(ranks: Sequence[DeviceMemory]) -> DeviceMemory:
        """The least memory and the largest communicator among all ranks."""
        return DeviceMemory(
            min(one.total for one in ranks),
            min(one.free for one in ranks),
            max(one.communicator for one in ranks),
            all(one.measured for one in ranks),
        )

    def cap(self, communicators: int) -> int:
        """Bytes that torch's allocator may reserve beside so many more communicators."""
        return max(1, self.free - communicators * self.communicator - self.margin)

    @property
    def margin(self) -> int:
        return int(MARGIN * self.total)

    def describe(self, communicators: int) -> str:
        """The cap and its parts, as a note of a plan."""
        groups = f"{communicators} more communicators of {human_bytes(self.communicator)} each"
        source = "measured" if self.measured else "estimated"
        return (
            f"memory: a rank may reserve {human_bytes(self.cap(communicators))}: "
            f"{human_bytes(self.free)} are free or its own, less {groups} ({source}) and a margin "
            f"of {human_bytes(self.margin)}"
        )


def _has_nccl() -> bool:
    return dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config()


def _load_libraries() -> None:
    """Runs a matrix product, for which torch loads cuBLAS and makes its context."""
    square = torch.ones(128, 128, device="cuda")
    torch.mm(square, square)


def _connect(group: dist.ProcessGroup | None) -> None:
    """Runs a collective, which connects the ranks of a group."""
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()


def _own_bytes() -> int:
    """Bytes that this process's allocator has reserved or may reserve."""
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
