"""`StateTransfers`: blocks of states on their way between memory and their places.

The states of a block are views of one piece of memory while it is stepped. Blocks are read ahead
and written behind; at most `BUFFERS` of them are in memory at once.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.core.common.block_storage import BUFFERS, BlockStorage, Extent
from autopar.core.operators.host_copies import HostBlock, HostCopies, copies_of
from autopar.errors import StrategyError

Place = Extent | HostBlock


class StateTransfers(ABC):
    """Reads and writes of blocks."""

    def __init__(self) -> None:
        self._leaving: deque[Callable[[], object]] = deque()

    @staticmethod
    def between(device: torch.device, folder: Path | None, checked: bool) -> StateTransfers:
        """Transfers of states of a device to a folder, or to host memory for None.

        Raises:
            OffloadError: the folder does not exist or cannot be written.
            StrategyError: CPUs have no memory below their own.
        """
        copies = copies_of(device)
        if folder is None and copies is None:
            raise StrategyError(
                "OffloadedOptimizer without a folder keeps states in the host memory of GPUs, and "
                f"the parameters are on {device}: give folder=..."
            )
        if copies is None:
            assert folder is not None
            return ToFile(BlockStorage(folder, checked))
        if folder is None:
            return ToHost(copies, device)
        return ThroughHost(BlockStorage(folder, checked), copies, device)

    @abstractmethod
    def begin_read(self, place: Any) -> Callable[[], Tensor]:
        """Begins to read a block; returns a wait for the memory that it fills."""

    def room(self, place: Place | None, size: int, memory: Tensor | None) -> tuple[Place, Tensor]:
        """A place and memory for a block of `size` bytes; the given ones if they have room."""
        if place is None or size > place.size:
            place = self._allocate(size)
        if memory is None or memory.numel() < place.size:
            memory = self._memory(place.size)
        return place, memory

    @abstractmethod
    def begin_write(self, place: Any, memory: Tensor) -> None:
        """Begins to write a block from memory, which is used again once it is written."""

    @abstractmethod
    def keep(self, memory: Tensor) -> None:
        """Takes back memory of a block that was only read."""

    def finish(self, left: int = 0) -> None:
        """Waits until at most `left` blocks are being written."""
        while len(self._leaving) > left:
            self._leaving.popleft()()

    @abstractmethod
    def _allocate(self, size: int) -> Place:
        """A new place."""

    @abstractmethod
    def _memory(self, size: int) -> Tensor:
        """Memory for a block, once few enough blocks are in memory."""


class ToFile(StateTransfers):
    """Blocks of a CPU in a file."""

    def __init__(self, storage: BlockStorage) -> None:
        super().__init__()
        self._storage = storage
        self._free: list[Tensor] = []

    def begin_read(self, place: Extent) -> Callable[[], Tensor]:
        memory = self._memory(place.size)
        return partial(_filled, memory, self._storage.read(place, memory.numpy().data).result)

    def begin_write(self, place: Extent, memory: Tensor) -> None:
        writing = self._storage.write(place, memory.numpy().data)
        self._leaving.append(partial(self._written, writing, memory))

    def keep(self, memory: Tensor) -> None:
        self._free.append(memory)

    def _written(self, writing: Future[None], memory: Tensor) -> None:
        writing.result()
        self.keep(memory)

    def _allocate(self, size: int) -> Extent:
        return self._storage.allocate(size)

    def _memory(self, size: int) -> Tensor:
        self.finish(BUFFERS - 2)
        for index, memory in enumerate(self._free):
            if memory.numel() >= size:
                return self._free.pop(index)
        self._free.clear()
        pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8)


class FromGpu(StateTransfers):
    """Blocks of a GPU, whose allocator keeps their memory."""

    def __init__(self, copies: HostCopies, device: torch.device) -> None:
        super().__init__()
        self._copies, self._device = copies, device

    def keep(self, memory: Tensor) -> None:
        pass

    def _memory(self, size: int) -> Tensor:
        self.finish(BUFFERS - 2)
        return torch.empty(size, dtype=torch.uint8, device=self._device)


class ToHost(FromGpu):
    """Blocks of a GPU in pinned memory."""

    def begin_read(self, place: HostBlock) -> Callable[[], Tensor]:
        memory = self._memory(place.size)
        copied = self._copies.from_host(memory, place)
        return partial(_filled, memory, partial(self._copies.wait, copied))

    def begin_write(self, place: HostBlock, memory: Tensor) -> None:
        copied = self._copies.to_host(place, memory[: place.size])
        self._leaving.append(partial(_filled, memory, partial(self._copies.wait, copied)))

    def _allocate(self, size: int) -> HostBlock:
        return self._copies.take(size)


class ThroughHost(FromGpu):
    """Blocks of a GPU in a file; pinned memory holds them on their way."""

    def __init__(self, storage: BlockStorage, copies: HostCopies, device: torch.device) -> None:
        super().__init__(copies, device)
        self._storage = storage

    def begin_read(self, place: Extent) -> Callable[[], Tensor]:
        block = self._copies.take(place.size)
        reading = self._storage.read(place, block.buffer, after=block.synchronize)
        return partial(self._read, block, reading)

    def begin_write(self, place: Extent, memory: Tensor) -> None:
        block = self._copies.take(place.size)
        self._copies.to_host(block, memory[: place.size])
        writing = self._storage.write(place, block.buffer, after=block.synchronize)
        self._leaving.append(partial(self._written, block, writing, memory))

    def _read(self, block: HostBlock, reading: Future[None]) -> Tensor:
        reading.result()
        memory = self._memory(block.size)
        self._copies.wait(self._copies.from_host(memory, block))
        self._copies.give_back(block)
        return memory

    def _written(self, block: HostBlock, writing: Future[None], _: Tensor) -> None:
        writing.result()
        self._copies.give_back(block)

    def _allocate(self, size: int) -> Extent:
        return self._storage.allocate(size)


def _filled(memory: Tensor, wait: Callable[[], object]) -> Tensor:
    """Memory after a transfer."""
    wait()
    return memory
