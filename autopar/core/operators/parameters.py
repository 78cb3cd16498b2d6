"""`autopar::fetch` and `autopar::fetched`: parameters on storage, read before their use.

| operator | |
|---|---|
| `fetch(parameter, folder)` | begins to read it into new memory |
| `fetched(buffer)` | waits until the memory holds it |

The memory of a stored parameter of a CPU is a mapping of a file in the folder. That of a GPU's is
pinned memory of the host, which kernels reach over the link; the folder is "". Whoever reads
or writes it, such as an optimizer or a state dict, does so as ever. Programs read it into memory
of their own instead, ahead of use.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from autopar.core.common.block_storage import BlockStorage, Extent
from autopar.core.operators.host_copies import HostBlock, HostCopies, copies_of, on_device
from autopar.core.operators.offload import bytes_of, empty_pages, storage_in
from autopar.core.operators.registration import register

LEAST_BYTES = 64 << 10
"""Smaller parameters stay in memory."""

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("fetch(Tensor parameter, str folder) -> Tensor")
_LIBRARY.define("fetched(Tensor buffer) -> Tensor")

fetch = torch.ops.autopar.fetch.default
fetched = torch.ops.autopar.fetched.default


Wait = Callable[[], object]


class _Home(Protocol):
    """The place of a stored parameter."""

    def settle(self) -> None:
        """Begins to write changes, and frees their memory."""

    def begin_read(self, like: Tensor) -> tuple[Tensor, Wait]:
        """Begins to read into new memory like a parameter; returns it, and a wait for its end."""

    def give_back(self) -> None:
        """Gives back the room of a parameter that is gone."""


@dataclass(frozen=True)
class _Mapped:
    """A mapped extent of a file; `mapped` lives as long as a tensor has its memory."""

    storage: BlockStorage
    extent: Extent
    mapped: weakref.ref[mmap.mmap]

    def settle(self) -> None:
        if (mapped := self.mapped()) is not None:
            self.storage.settle(self.extent, mapped)

    def begin_read(self, like: Tensor) -> tuple[Tensor, Wait]:
        # pages that anyone touched since the step would stay until memory is short
        self.settle()
        pages = empty_pages(self.extent.size)
        reading = self.storage.read(self.extent, pages.numpy().data)
        return pages[: like.nbytes].view(like.dtype).view(like.shape), reading.result

    def give_back(self) -> None:
        self.storage.give_back(self.extent)


@dataclass(frozen=True)
class _OnHost:
    """Pinned memory of the host."""

    copies: HostCopies
    block: HostBlock

    def settle(self) -> None:
        pass  # kernels write to this memory itself

    def begin_read(self, like: Tensor) -> tuple[Tensor, Wait]:
        buffer = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        copied = self.copies.from_host(bytes_of(buffer), self.block)
        return buffer, lambda: self.copies.wait(copied)

    def give_back(self) -> None:
        self.copies.give_back(self.block)


_homes: dict[int, _Home] = {}
"""Stored parameters by their addresses."""

_reading: dict[int, tuple[Tensor, Wait]] = {}
"""Buffers that are being read, with waits for the end, by their addresses."""


def store(value: Tensor, folder: str) -> None:
    """Moves the memory of a tensor to the lower level; a small one stays.

    Raises:
        OffloadError: the disk is full, the folder cannot be written, or the host lacks memory.
    """
    if value.nbytes < LEAST_BYTES or value.data_ptr() in _homes:
        return
    copies = copies_of(value.device)
    content = value.detach().reshape(-1).view(torch.uint8)
    home, memory, owner = _in_file(content, folder) if copies is None else _on_host(content, copies)
    value.data = memory[: value.nbytes].view(value.dtype).view(value.shape)
    address = value.data_ptr()
    _homes[address] = home
    weakref.finalize(owner, _forget, address).atexit = False


def _in_file(content: Tensor, folder: str) -> tuple[_Home, Tensor, object]:
    """Writes bytes to a mapped file; returns their home, their memory, and its owner."""
    storage = storage_in(folder)
    extent = storage.allocate(content.numel())
    storage.write(extent, content.numpy().data).result()
    mapped = storage.map(extent)
    return (
        _Mapped(storage, extent, weakref.ref(mapped)),
        torch.frombuffer(mapped, dtype=torch.uint8),
        mapped,
    )


def _on_host(content: Tensor, copies: HostCopies) -> tuple[_Home, Tensor, object]:
    """As `_in_file`, in pinned memory."""
    block = copies.take(content.numel())
    copies.wait(copies.to_host(block, content))
    memory, owner = on_device(block.memory, content.device)
    return _OnHost(copies, block), memory, owner


def settle(value: Tensor) -> None:
    """Begins to write a stored tensor that has changed, and frees its pages in memory."""
    if (home := _homes.get(value.data_ptr())) is not None:
        home.settle()


def _forget(address: int) -> None:
    """Gives back the room of a tensor that is gone."""
    _homes.pop(address).give_back()


def _fetch(parameter: Tensor, folder: str) -> Tensor:
    home = _homes.get(parameter.data_ptr())
    if home is None:  # the user gave it other memory
        return parameter.detach().clone()
    value, wait = home.begin_read(parameter)
    _reading[value.data_ptr()] = value, wait
    return value


def _memory_like(parameter: Tensor, folder: str) -> Tensor:
    return torch.empty_like(parameter)


def _fetched(buffer: Tensor) -> Tensor:
    if (reading := _reading.pop(buffer.data_ptr(), None)) is not None:
        reading[1]()
    return buffer


register(
    _LIBRARY,
    {"fetch": (_fetch, _memory_like), "fetched": (_fetched, torch.ops.aten.alias.default)},
)
