"""`HostCopies`: copies between a GPU and pinned memory of its host, beside compute.

Copies each way follow one another on a stream of their own. They begin once compute has done all
that it was given before them, and compute goes on until it waits for their event. Pinned
memory is kept for later copies of its size, so that a step takes no more of it than the one before.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.core.common.block_storage import round_up
from autopar.errors import OffloadError
from autopar.formatting import human_bytes

_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister


@dataclass(eq=False)
class HostBlock:
    """Pinned memory.

    Attributes:
        memory: its bytes, from a page's start.
        copied: end of the last copy from or to it; None before the first.
    """

    memory: Tensor
    copied: torch.cuda.Event | None = None

    @property
    def size(self) -> int:
        """Number of its bytes."""
        return self.memory.numel()

    @property
    def buffer(self) -> memoryview:
        """Its bytes, for reads and writes of files."""
        return self.memory.numpy().data

    def synchronize(self) -> None:
        """Lets the host wait for the last copy."""
        if self.copied is not None:
            self.copied.synchronize()


class PinnedPages(mmap.mmap):
    """Pages of host memory that a GPU can address until they are freed.

    CUDA keeps a registration beyond `munmap`. Memory that later gets such an address cannot be
    copied, pinned or freed (cudaErrorInvalidValue), so the registration must end first.
    """

    device: torch.device | None = None  # None until they are pinned

    def pin(self, device: torch.device) -> Tensor:
        """Register the pages with CUDA; return their bytes."""
        memory = torch.frombuffer(self, dtype=torch.uint8)
        flags = _PORTABLE | _MAPPED
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(self), flags)
        torch.cuda.check_error(error)
        self.device = device
        return memory

    def __del__(self) -> None:
        # A finalizer of `weakref` would run after mmap's own `munmap`.
        if self.device is not None and not sys.is_finalizing():
            address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            torch.cuda.synchronize(self.device)  # copies and kernels may still use the pages
            torch.cuda.cudart().cudaHostUnregister(address)


def pinned_memory(size: int, device: torch.device) -> Tensor:
    """New pinned memory of `size` bytes, which a GPU can address, too.

    torch's own is as large as the next power of two.
    """
    return PinnedPages(-1, size).pin(device)


class HostCopies:
    """Copies of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: weakref.WeakSet[HostBlock] = weakref.WeakSet()
        self._outward, self._inward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, list[HostBlock]] = {}

    def take(self, nbytes: int) -> HostBlock:
        """A block of at least `nbytes` bytes, one that was given back if it has that size.

        Raises:
            OffloadError: the system refuses so much pinned memory.
        """
        size = round_up(nbytes)
        if idle := self._free.get(size):
            return idle.pop()
        try:
            return self._pin(size)
        except (RuntimeError, OSError) as error:
            self._free.clear()  # blocks of other sizes that nothing uses
            try:
                return self._pin(size)
            except (RuntimeError, OSError):
                raise OffloadError(
                    f"{human_bytes(size)} of host memory cannot be pinned beside "
                    f"{human_bytes(self.pinned_bytes)} that is ({error}): offload less, or give "
                    "Strategy(offload_dir=...) to use storage"
                ) from error

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""
        return sum(block.size for block in self._blocks)

    def _pin(self, size: int) -> HostBlock:
        block = HostBlock(pinned_memory(size, self._device))
        self._blocks.add(block)
        return block

    def give_back(self, block: HostBlock) -> None:
        """Lets another use of a block follow, after its last copy."""
        self._free.setdefault(block.size, []).append(block)

    def to_host(self, block: HostBlock, source: Tensor) -> torch.cuda.Event:
        """Begins to copy bytes of the GPU to the start of a block; returns the end."""
        return self._copy(self._outward, block.memory[: source.numel()], source, block)

    def from_host(self, target: Tensor, block: HostBlock) -> torch.cuda.Event:
        """Begins to copy the start of a block to bytes of the GPU; returns the end."""
        return self._copy(self._inward, target, block.memory[: target.numel()], block)

    def wait(self, copied: torch.cuda.Event) -> None:
        """Lets compute that follows wait for the end of a copy."""
        torch.cuda.current_stream(self._device).wait_event(copied)

    def _copy(
        self, stream: torch.cuda.Stream, target: Tensor, source: Tensor, block: HostBlock
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        if block.copied is not None:  # of the other stream, or of an earlier value
            stream.wait_event(block.copied)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        block.copied = torch.cuda.Event()
        block.copied.record(stream)
        return block.copied


class UnpinnedCopies(HostCopies):
    """Copies within the memory of a CPU, at once."""

    pinned_bytes = 0

    def __init__(self) -> None:
        self._outward = self._inward = None  # type: ignore[assignment]

    def take(self, nbytes: int) -> HostBlock:
        """A new block."""
        pages = mmap.mmap(-1, round_up(nbytes))
        return HostBlock(torch.frombuffer(pages, dtype=torch.uint8))

    def wait(self, copied: object) -> None:
        """Nothing is left to wait for."""

    def _copy(self, stream: object, target: Tensor, source: Tensor, block: HostBlock) -> Any:
        target.copy_(source)


_absent = ContextVar("absent", default=False)


@contextmanager
def standing_in() -> Iterator[None]:
    """Lets the CPU stand in for a GPU that is not here, with `UnpinnedCopies`."""
    token = _absent.set(True)
    try:
        yield
    finally:
        _absent.reset(token)


def copies_of(device: torch.device) -> HostCopies | None:
    """The copies of this process for a GPU; None for a CPU."""
    if device.type == "cuda":
        return _copies(device)
    return UnpinnedCopies() if _absent.get() else None


@cache
def _copies(device: torch.device) -> HostCopies:
    return HostCopies(device)


class _Addressed:
    """Pinned memory by the CUDA Array Interface, version 3."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (memory.data_ptr(), False),
            "version": 3,
        }


def on_device(memory: Tensor, device: torch.device) -> tuple[Tensor, object]:
    """Pinned memory as a tensor of the GPU, whose kernels reach it over the link.

    Also returns an object that lives as long as a tensor has this memory.

    Raises:
        OffloadError: the GPU does not address the memory of its host.
    """
    owner = _Addressed(memory)
    seen = torch.as_tensor(owner, device=device)
    if seen.data_ptr() != memory.data_ptr():  # a copy
        raise OffloadError(
            f"{device} does not address pinned memory of its host: give "
            "Strategy(offload='activations') instead of parameters"
        )
    return seen, owner
