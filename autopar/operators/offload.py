"""`autopar::offload` and its kin: a tensor on storage between two points of a program.

| operator | |
|---|---|
| `offload(value, folder)` | begins to write; returns a ticket, a tensor of one number |
| `offloaded(ticket, value)` | waits until the value is written and its memory may go |
| `prefetch(ticket, size, stride, dtype, device)` | begins to read into new memory |
| `prefetched(buffer, ticket)` | waits until the memory holds the value |

The bytes of a value lie in the file of its folder as long as its ticket exists. A process has one
file in a folder, whose room is used again.
"""

from __future__ import annotations

import itertools
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.common.block_storage import PAGE, BlockStorage, Extent
from autopar.common.heap import LARGE, use_huge_pages

_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("offload(Tensor value, str folder) -> Tensor")
_LIBRARY.define("offloaded(Tensor ticket, Tensor value) -> Tensor")
_LIBRARY.define(
    "prefetch(Tensor ticket, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor"
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


@dataclass(eq=False)
class _Stored:
    """A value on storage, as it lay in memory, and where it is read to."""

    storage: BlockStorage
    extent: Extent
    like: Tensor
    reading: Future[None] | None = None
    host: Tensor | None = None


_stored: dict[int, _Stored] = {}
_numbers = itertools.count(1)


def _offload(value: Tensor, folder: str) -> Tensor:
    storage = storage_in(folder)
    data = _bytes_of(value.detach().cpu())
    extent = storage.allocate(data.numel())
    storage.write(extent, data.numpy().data)
    key = next(_numbers)
    _stored[key] = _Stored(storage, extent, value.detach().to("meta"))
    number = memoryview(bytearray(key.to_bytes(8, "little")))
    weakref.finalize(number, _forget, key).atexit = False
    return torch.frombuffer(number, dtype=torch.int64)


def _offloaded(ticket: Tensor, value: Tensor) -> Tensor:
    writing = _stored[int(ticket)].extent.writing
    assert writing is not None
    writing.result()
    return ticket


def _prefetch(ticket: Tensor, *like: Any) -> Tensor:
    device, own = like[-1], _stored[int(ticket)]
    pages = empty_pages(own.extent.size)
    own.reading = own.storage.read(own.extent, pages.numpy().data)
    typed = pages.view(own.like.dtype)
    own.host = typed.as_strided(own.like.shape, own.like.stride(), typed.storage_offset())
    return own.host if device.type == "cpu" else torch.empty_like(own.host, device=device)


def empty_pages(size: int) -> Tensor:
    """New memory of some bytes that begins at a page."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    pages = memory[start : start + size]
    if size >= LARGE:  # freed whole, so that nothing else is in its pages
        use_huge_pages(pages.data_ptr(), size)
    return pages


def _prefetched(buffer: Tensor, ticket: Tensor) -> Tensor:
    own = _stored[int(ticket)]
    assert own.reading is not None
    assert own.host is not None
    own.reading.result()
    if buffer.device.type != "cpu":
        buffer.copy_(own.host)
    own.reading = own.host = None
    return buffer


def _forget(key: int) -> None:
    """Gives back the room of a value whose ticket is gone."""
    own = _stored.pop(key)
    own.storage.give_back(own.extent)


def _bytes_of(value: Tensor) -> Tensor:
    """All bytes from the first element of a tensor to its last, in one dim."""
    spans = ((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    flat = value.as_strided((1 + sum(spans),), (1,), value.storage_offset())
    return flat.view(torch.uint8)


def _ticket_like(value: Tensor, folder: str) -> Tensor:
    return value.new_empty((1,), dtype=torch.int64, device="cpu")


def _memory_like(ticket: Tensor, size: Any, stride: Any, dtype: Any, device: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _same(first: Tensor, second: Tensor) -> Tensor:
    """As of a wait: the schema says nothing of it, so that no pass takes it for a view."""
    return torch.ops.aten.alias.default(first)


for _name, _run, _fake in (
    ("offload", _offload, _ticket_like),
    ("offloaded", _offloaded, _same),
    ("prefetch", _prefetch, _memory_like),
    ("prefetched", _prefetched, _same),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{_name}", _fake, lib=_LIBRARY)
