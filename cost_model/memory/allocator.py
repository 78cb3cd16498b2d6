"""Models of torch's allocators: bytes allocated and bytes reserved for a sequence of requests.

Allocated bytes are those of tensors, as `torch.cuda.memory_allocated` counts them. Reserved bytes
are those taken from the device. Constants and rules: torch 2.11 to 2.13
(c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp), default settings.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left, insort

_MB = 2**20
_MIN_BLOCK = 512  # kMinBlockSize
_MAX_SMALL = _MB  # kSmallSize: largest request in segments of _SMALL_SEGMENT
_SMALL_SEGMENT = 2 * _MB  # kSmallBuffer
_MIN_LARGE = 10 * _MB  # kMinLargeAlloc: smaller requests share segments of _SEGMENT
_SEGMENT = 20 * _MB  # large_segment_size
_ROUND_SEGMENT = 2 * _MB  # kRoundLarge

_HOST_ALIGNMENT = 64  # gAlignment of c10/core/alignment.h

_CONTEXT = {"V100": 1271 * _MB, "A100": 1573 * _MB}
CONTEXT_SOURCE = "modelled by what bigscience saw of the driver, the kernels and libraries on A100"


class HostAllocator:
    """The CPU's allocator: one block for each tensor, aligned to 64 bytes and freed at once."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._blocks: dict[int, int] = {}
        self._next = 0

    def malloc(self, nbytes: int) -> int:
        address = self._next
        self._next += _aligned(nbytes, _HOST_ALIGNMENT) or 1
        self._blocks[address] = nbytes
        self.allocated += nbytes
        self.reserved += _aligned(nbytes, _HOST_ALIGNMENT)
        return address

    def size(self, address: int) -> int:
        return self._blocks[address]

    def free(self, address: int) -> None:
        nbytes = self._blocks.pop(address)
        self.allocated -= nbytes
        self.reserved -= _aligned(nbytes, _HOST_ALIGNMENT)


class CachingAllocator:
    """The GPU's allocator: segments are taken from the device, kept, and split into blocks.

    Best fit for the requests of one stream. Small requests (to 1 MiB) have segments of their own.
    A free block is split unless the rest is of little use; free neighbours are merged.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address)
        self._starts: dict[int, int] = {}  # of free blocks: address -> size
        self._ends: dict[int, int] = {}  # of free blocks: end -> address
        self._used: dict[int, tuple[int, bool]] = {}  # address -> size, whether small
        self._next = 0
        self._empty = 0

    def malloc(self, nbytes: int) -> int:
        """The address of a new block; a block of 0 bytes takes no memory."""
        if nbytes == 0:
            self._empty -= 1
            self._used[self._empty] = (0, True)
            return self._empty
        size = _aligned(nbytes, _MIN_BLOCK)
        small = size <= _MAX_SMALL
        block, address = self._best_fit(size, small) or self._new_segment(size)
        rest = block - size
        if rest >= _MIN_BLOCK if small else rest > _MAX_SMALL:
            self._insert(address + size, rest, small)
            block = size
        self._used[address] = (block, small)
        self.allocated += block
        return address

    def size(self, address: int) -> int:
        """Bytes of a block: the request rounded up, and any rest that was not split off."""
        return self._used[address][0]

    def free(self, address: int) -> None:
        """Frees a block; its segment remains reserved."""
        size, small = self._used.pop(address)
        self.allocated -= size
        if not size:
            return
        after = self._starts.get(address + size)
        if after is not None:
            self._remove(address + size, after, small)
            size += after
        before = self._ends.get(address)
        if before is not None:
            before_size = self._starts[before]
            self._remove(before, before_size, small)
            address, size = before, size + before_size
        self._insert(address, size, small)

    def _best_fit(self, size: int, small: bool) -> tuple[int, int] | None:
        """Size and address of the smallest free block that fits, removed; None without any."""
        pool = self._free[small]
        index = bisect_left(pool, (size, 0))
        if index == len(pool):
            return None
        block, address = pool[index]
        self._remove(address, block, small)
        return block, address

    def _new_segment(self, size: int) -> tuple[int, int]:
        """Size and address of a new segment; a gap separates it from the previous one."""
        block = segment_bytes(size)
        address = self._next
        self._next += block + 1
        self.reserved += block
        return block, address

    def _insert(self, address: int, size: int, small: bool) -> None:
        insort(self._free[small], (size, address))
        self._starts[address] = size
        self._ends[address + size] = address

    def _remove(self, address: int, size: int, small: bool) -> None:
        pool = self._free[small]
        del pool[bisect_left(pool, (size, address))]
        del self._starts[address], self._ends[address + size]


def allocator_of(device: str) -> HostAllocator | CachingAllocator:
    """A new allocator of a device, "cpu" or "cuda"."""
    return CachingAllocator() if device == "cuda" else HostAllocator()


def segment_bytes(size: int) -> int:
    """Bytes that a request takes from the GPU if no free block fits."""
    if size <= _MAX_SMALL:
        return _SMALL_SEGMENT
    return _SEGMENT if size < _MIN_LARGE else _aligned(size, _ROUND_SEGMENT)


def workspace_bytes(device: str) -> int:
    """Bytes of cuBLAS's permanent workspace (getChosenWorkspaceSize) on "cpu" or a named GPU.

    CUBLAS_WORKSPACE_CONFIG chooses it, as `:KIB:COUNT` once or more.
    """
    if device == "cpu":
        return 0
    chosen = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if chosen:
        return sum(int(size) * int(count) for size, count in chosen) * 2**10
    recent = any(name in device for name in ("H100", "H200", "H20", "H800", "B200", "B300"))
    return 32 * _MB if recent else 8 * _MB + 128 * 2**10


def context_bytes(device: str) -> int:
    """Bytes that a process takes of a GPU outside of torch's allocator; see CONTEXT_SOURCE.

    Unknown GPUs count as an A100.
    """
    if device == "cpu":
        return 0
    return next((size for name, size in _CONTEXT.items() if name in device), _CONTEXT["A100"])


def _aligned(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
