"""`autopar::offload` and its kin: a tensor on a lower level of memory between two points.

| operator | |
|---|---|
| `offload(value, folder)` | begins to write; returns a ticket, a tensor of one number |
| `offloaded(ticket, value)` | waits until the value may go; returns a new ticket |
| `prefetch(ticket, folder, size, stride, dtype, device)` | begins to read into new memory |
| `prefetched(buffer, ticket)` | waits until the memory holds the value |

A value of a CPU goes to this process's file in the folder. A value of a GPU goes to pinned
memory of the host, and on to the file unless the folder is "". Its bytes lie there as long as its
ticket exists; then their room is used again. A GPU's waits are waits of its stream, except for
those for a file.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.core.common.block_storage import PAGE, BlockStorage, Extent
from autopar.core.common.heap import LARGE, use_huge_pages
from autopar.core.operators.host_copies import HostBlock, HostCopies, copies_of
from autopar.core.operators.numbers import Numbered, number_like
from autopar.core.operators.registration import register
from autopar.errors import OffloadError

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("offload(Tensor value, str folder) -> Tensor")
_LIBRARY.define("offloaded(Tensor ticket, Tensor value) -> Tensor")
_LIBRARY.define(
    "prefetch(Tensor ticket, str folder, int[] size, int[] stride, ScalarType dtype, "
    "Device device) -> Tensor"
)
_LIBRARY.define("prefetched(Tensor buffer, Tensor ticket) -> Tensor")

offload = torch.ops.autopar.offload.default
offloaded = torch.ops.autopar.offloaded.default
prefetch = torch.ops.autopar.prefetch.default
prefetched = torch.ops.autopar.prefetched.default


@cache
def storage_in(folder: str) -> BlockStorage:
    """This process's file in a folder.

    Raises:
        OffloadError: the folder does not exist or cannot be written.
    """
    return BlockStorage(Path(folder))


def check_lower_level(folder: str, device: torch.device) -> None:
    """Checks that tensors of a device can go to a folder, or to host memory for "".

    Raises:
        OffloadError: they cannot.
    """
    if folder:
        storage_in(folder)
    elif copies_of(device) is None:
        raise OffloadError(
            "the plan offloads to host memory, which only GPUs have below their own, and the "
            f"model is on {device}: plan with Strategy(offload_dir=...)"
        )


class _Stored(Protocol):
    """A value on a lower level of memory."""

    def finish_write(self) -> None:
        """Waits until the value's memory may go."""

    def begin_read(self, *layout: Any) -> Tensor:
        """Begins to read into new memory of this size, stride, dtype and device."""

    def finish_read(self, buffer: Tensor) -> None:
        """Waits until the memory holds the value."""

    def forget(self) -> None:
        """Gives back the value's room, also in the middle of a transfer."""


@dataclass(eq=False)
class _InFile:
    """A value of a CPU in a file."""

    storage: BlockStorage
    extent: Extent
    reading: Future[None] | None = None

    @staticmethod
    def of(data: Tensor, folder: str) -> _InFile:
        """Begins to write bytes."""
        storage = storage_in(folder)
        extent = storage.allocate(data.numel())
        storage.write(extent, data.numpy().data)
        return _InFile(storage, extent)

    def finish_write(self) -> None:
        assert self.extent.writing is not None
        self.extent.writing.result()

    def begin_read(self, *layout: Any) -> Tensor:
        size, stride, dtype, _ = layout
        pages = empty_pages(self.extent.size)
        self.reading = self.storage.read(self.extent, pages.numpy().data)
        typed = pages.view(dtype)
        return typed.as_strided(size, stride, typed.storage_offset())

    def finish_read(self, buffer: Tensor) -> None:
        assert self.reading is not None
        self.reading.result()
        self.reading = None

    def forget(self) -> None:
        self.storage.give_back(self.extent)


@dataclass(eq=False)
class _OnHost:
    """A value of a GPU in pinned memory.

    Attributes:
        moving: memory of the GPU that a copy reads or fills, until compute has waited for it.
    """

    copies: HostCopies
    block: HostBlock
    moving: Tensor | None

    @staticmethod
    def of(copies: HostCopies, data: Tensor) -> _OnHost:
        """Begins to copy bytes."""
        block = copies.take(data.numel())
        copies.to_host(block, data)
        return _OnHost(copies, block, data)

    def finish_write(self) -> None:
        self._wait()

    def begin_read(self, *layout: Any) -> Tensor:
        buffer = new_memory(*layout)
        self.moving = bytes_of(buffer)
        self.copies.from_host(self.moving, self.block)
        return buffer

    def finish_read(self, buffer: Tensor) -> None:
        self._wait()

    def forget(self) -> None:
        self._wait()
        self.copies.give_back(self.block)

    def _wait(self) -> None:
        if self.moving is not None:
            assert self.block.copied is not None
            self.copies.wait(self.block.copied)
            self.moving = None


@dataclass(eq=False)
class _ThroughHost:
    """A value of a GPU in a file; pinned memory holds it on its way.

    Attributes:
        host: its pinned memory while it moves, and None otherwise.
    """

    copies: HostCopies
    storage: BlockStorage
    extent: Extent
    host: _OnHost | None
    reading: Future[None] | None = None

    @staticmethod
    def of(copies: HostCopies, data: Tensor, folder: str) -> _ThroughHost:
        """Begins to copy bytes, and to write them once they are copied."""
        storage = storage_in(folder)
        extent = storage.allocate(data.numel())
        host = _OnHost.of(copies, data)
        storage.write(extent, host.block.buffer, after=host.block.synchronize)
        return _ThroughHost(copies, storage, extent, host)

    def finish_write(self) -> None:
        assert self.host is not None
        assert self.extent.writing is not None
        self.extent.writing.result()
        self._leave_host()

    def begin_read(self, *layout: Any) -> Tensor:
        block = self.copies.take(self.extent.size)
        self.host = _OnHost(self.copies, block, None)
        self.reading = self.storage.read(self.extent, block.buffer, after=block.synchronize)
        return new_memory(*layout)

    def finish_read(self, buffer: Tensor) -> None:
        assert self.host is not None
        assert self.reading is not None
        self.reading.result()
        self.host.moving = bytes_of(buffer)
        self.copies.from_host(self.host.moving, self.host.block)
        self._leave_host()

    def forget(self) -> None:
        under_way = [f for f in (self.extent.writing, self.reading) if f is not None]
        wait(under_way)
        self._leave_host()
        self.storage.give_back(self.extent)

    def _leave_host(self) -> None:
        if self.host is not None:
            self.host.forget()
            self.host = None


_stored: Numbered[_Stored] = Numbered(lambda stored: stored.forget())


def _offload(value: Tensor, folder: str) -> Tensor:
    data, copies = bytes_of(value.detach()), copies_of(value.device)
    if copies is None:
        stored: _Stored = _InFile.of(data, folder)
    elif folder:
        stored = _ThroughHost.of(copies, data, folder)
    else:
        stored = _OnHost.of(copies, data)
    return _stored.add(stored)


def _offloaded(ticket: Tensor, value: Tensor) -> Tensor:
    _stored[ticket].finish_write()
    return _stored.add(_stored.pop(ticket))  # a result may not be an argument


def _prefetch(ticket: Tensor, folder: str, *layout: Any) -> Tensor:
    return _stored[ticket].begin_read(*layout)


def _prefetched(buffer: Tensor, ticket: Tensor) -> Tensor:
    _stored[ticket].finish_read(buffer)
    return buffer


def empty_pages(size: int) -> Tensor:
    """New memory of some bytes that begins at a page."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    pages = memory[start : start + size]
    if size >= LARGE:  # freed whole, so that nothing else is in its pages
        use_huge_pages(pages.data_ptr(), size)
    return pages


def bytes_of(value: Tensor) -> Tensor:
    """All bytes from the first element of a tensor to its last, in one dim."""
    spans = ((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    flat = value.as_strided((1 + sum(spans),), (1,), value.storage_offset())
    return flat.view(torch.uint8)


def _memory_like(ticket: Tensor, folder: str, *layout: Any) -> Tensor:
    return new_memory(*layout)


def new_memory(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory of a layout."""
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _same_memory(buffer: Tensor, ticket: Tensor) -> Tensor:
    """As of a wait: the schema says nothing of it, so that no pass takes it for a view."""
    return torch.ops.aten.alias.default(buffer)


register(
    _LIBRARY,
    {
        "offload": (_offload, number_like),
        "offloaded": (_offloaded, number_like),
        "prefetch": (_prefetch, _memory_like),
        "prefetched": (_prefetched, _same_memory),
    },
)
