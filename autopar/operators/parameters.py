"""`autopar::fetch` and `autopar::fetched`: parameters on storage, read before their use.

| operator | |
|---|---|
| `fetch(parameter)` | begins to read it into new memory |
| `fetched(buffer)` | waits until the memory holds it |

A stored parameter is a tensor whose memory is a mapping of a file. Whoever reads or writes it,
such as an optimizer or a state dict, does so as ever, and the kernel moves pages. Programs read
the file into memory of their own instead, ahead of use.
"""

from __future__ import annotations

import mmap
import weakref
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.common.block_storage import BlockStorage, Extent
from autopar.operators.offload import empty_pages, storage_in

LEAST_BYTES = 64 << 10
"""Smaller parameters stay in memory."""

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("fetch(Tensor parameter) -> Tensor")
_LIBRARY.define("fetched(Tensor buffer) -> Tensor")

fetch = torch.ops.autopar.fetch.default
fetched = torch.ops.autopar.fetched.default


@dataclass(frozen=True)
class _Home:
    """A mapped extent; `mapped` lives as long as a tensor has its memory."""

    storage: BlockStorage
    extent: Extent
    mapped: weakref.ref[mmap.mmap]

    def settle(self) -> None:
        if (mapped := self.mapped()) is not None:
            self.storage.settle(self.extent, mapped)


_homes: dict[int, _Home] = {}
"""Stored parameters by their addresses."""

_reading: dict[int, Future[None]] = {}
"""Reads under way by the addresses of their buffers."""


def store(value: Tensor, folder: str) -> None:
    """Moves the memory of a tensor to storage; a small one stays.

    Raises:
        OffloadError: the disk is full, or the folder cannot be written.
    """
    if value.nbytes < LEAST_BYTES or value.data_ptr() in _homes:
        return
    storage = storage_in(folder)
    content = value.detach().reshape(-1).view(torch.uint8)
    extent = storage.allocate(content.numel())
    storage.write(extent, content.numpy().data).result()
    mapped = storage.map(extent)
    flat = torch.frombuffer(mapped, dtype=value.dtype, count=value.numel())
    value.data = flat.view(value.shape)
    address = value.data_ptr()
    _homes[address] = _Home(storage, extent, weakref.ref(mapped))
    weakref.finalize(mapped, _forget, address).atexit = False


def settle(value: Tensor) -> None:
    """Begins to write a stored tensor that has changed, and frees its pages in memory."""
    if (home := _homes.get(value.data_ptr())) is not None:
        home.settle()


def _forget(address: int) -> None:
    """Gives back the room of a tensor that is gone."""
    home = _homes.pop(address)
    home.storage.give_back(home.extent)


def _fetch(parameter: Tensor) -> Tensor:
    home = _homes.get(parameter.data_ptr())
    if home is None:  # the user gave it other memory
        return parameter.detach().clone()
    home.settle()
    pages = empty_pages(home.extent.size)
    reading = home.storage.read(home.extent, pages.numpy().data)
    value = pages[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
    _reading[value.data_ptr()] = reading
    return value


def _fetched(buffer: Tensor) -> Tensor:
    if (reading := _reading.pop(buffer.data_ptr(), None)) is not None:
        reading.result()
    return buffer


for _name, _run, _fake in (
    ("fetch", _fetch, torch.empty_like),
    ("fetched", _fetched, torch.ops.aten.alias.default),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{_name}", _fake, lib=_LIBRARY)
