"""What torch's allocators make of a sequence of requests: bytes allocated, and bytes reserved.

Allocated is what tensors hold, as `torch.cuda.memory_allocated` counts it; reserved is what the
process has taken from the device, which is what runs out. Constants and rules are those of torch
2.11 to 2.13 (c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp) with its default
settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

_MB = 2**20
_LEAST_BLOCK = 512  # kMinBlockSize
_MOST_SMALL = _MB  # kSmallSize: requests up to here share segments of
_SMALL_SEGMENT = 2 * _MB  # kSmallBuffer
_LEAST_LARGE = 10 * _MB  # kMinLargeAlloc: requests below share segments of
_SEGMENT = 20 * _MB  # large_segment_size
_ROUND_SEGMENT = 2 * _MB  # kRoundLarge

_HOST_ALIGNMENT = 64  # gAlignment of c10/core/alignment.h

_CONTEXT = {"V100": 1271 * _MB, "A100": 1573 * _MB}
CONTEXT_SOURCE = "modelled by what bigscience saw of the driver, the kernels and libraries on A100"


class Allocator(Protocol):
    """Hands out memory.

    Attributes:
        allocated: bytes handed out now.
        reserved: bytes taken from the device now.
    """

    allocated: int
    reserved: int

    def malloc(self, nbytes: int) -> int:
        """The address of a new block."""
        ...

    def size(self, address: int) -> int:
        """Bytes of a block as `allocated` counts it."""
        ...

    def free(self, address: int) -> None:
        """Takes a block back."""
        ...


def allocator_of(device: str) -> Allocator:
    """The allocator of a type of device, nothing handed out yet."""
    return CachingAllocator() if device == "cuda" else HostAllocator()


class HostAllocator:
    """The CPU's: every tensor is a block of its own, aligned to 64 bytes and freed at once."""

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._blocks: dict[int, int] = {}
        self._next = 0

    def malloc(self, nbytes: int) -> int:
        """The address of a new block."""
        address = self._next
        self._next += _aligned(nbytes, _HOST_ALIGNMENT) or 1
        self._blocks[address] = nbytes
        self.allocated += nbytes
        self.reserved += _aligned(nbytes, _HOST_ALIGNMENT)
        return address

    def size(self, address: int) -> int:
        """Bytes of a block."""
        return self._blocks[address]

    def free(self, address: int) -> None:
        """Takes a block back."""
        nbytes = self._blocks.pop(address)
        self.allocated -= nbytes
        self.reserved -= _aligned(nbytes, _HOST_ALIGNMENT)


class CachingAllocator:
    """The GPU's: segments are taken from the device, kept, and cut into blocks.

    Requests of one stream, best fit first. Small requests (to 1 MiB) and others are served from
    segments of their own. A free block is cut unless what would remain is of little use; free
    neighbours grow together.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address)
        self._starts: dict[int, int] = {}  # of free blocks: address -> size
        self._ends: dict[int, int] = {}  # of free blocks: end -> address
        self._used: dict[int, tuple[int, bool]] = {}  # address -> size, whether small
        self._next = 0
        self._nothing = 0

    def malloc(self, nbytes: int) -> int:
        """The address of a new block; one of no bytes takes no memory."""
        if nbytes == 0:
            self._nothing -= 1
            self._used[self._nothing] = (0, True)
            return self._nothing
        size = _aligned(nbytes, _LEAST_BLOCK)
        small = size <= _MOST_SMALL
        have, address = self._fitting(size, small) or self._segment(size)
        rest = have - size
        if rest >= _LEAST_BLOCK if small else rest > _MOST_SMALL:
            self._put(address + size, rest, small)
            have = size
        self._used[address] = (have, small)
        self.allocated += have
        return address

    def size(self, address: int) -> int:
        """Bytes of a block: those asked for, rounded up, and what was not worth cutting off."""
        return self._used[address][0]

    def free(self, address: int) -> None:
        """Takes a block back; its segment stays reserved."""
        size, small = self._used.pop(address)
        self.allocated -= size
        if not size:
            return
        after = self._starts.get(address + size)
        if after is not None:
            self._take(address + size, after, small)
            size += after
        before = self._ends.get(address)
        if before is not None:
            grown = self._starts[before]
            self._take(before, grown, small)
            address, size = before, size + grown
        self._put(address, size, small)

    def _fitting(self, size: int, small: bool) -> tuple[int, int] | None:
        """The smallest free block that is large enough, taken out; None if there is none."""
        pool = self._free[small]
        place = bisect_left(pool, (size, 0))
        if place == len(pool):
            return None
        have, address = pool[place]
        self._take(address, have, small)
        return have, address

    def _segment(self, size: int) -> tuple[int, int]:
        """A new segment; a gap keeps it apart from the one before."""
        have = segment_bytes(size)
        address = self._next
        self._next += have + 1
        self.reserved += have
        return have, address

    def _put(self, address: int, size: int, small: bool) -> None:
        insort(self._free[small], (size, address))
        self._starts[address] = size
        self._ends[address + size] = address

    def _take(self, address: int, size: int, small: bool) -> None:
        pool = self._free[small]
        del pool[bisect_left(pool, (size, address))]
        del self._starts[address], self._ends[address + size]


def segment_bytes(size: int) -> int:
    """What is taken from the GPU for a request, in bytes, if no free block fits."""
    if size <= _MOST_SMALL:
        return _SMALL_SEGMENT
    return _SEGMENT if size < _LEAST_LARGE else _aligned(size, _ROUND_SEGMENT)


def workspace_bytes(device: str) -> int:
    """What cuBLAS is given by torch's allocator, once and for good (getChosenWorkspaceSize).

    Args:
        device: "cpu", or the name of the GPU.
    """
    if device == "cpu":
        return 0
    recent = any(name in device for name in ("H100", "H200", "H20", "GH200", "B200", "B300"))
    return 32 * _MB if recent else 8 * _MB + 128 * 2**10


def context_bytes(device: str) -> int:
    """What a process takes of a GPU outside of torch's allocator; see CONTEXT_SOURCE.

    Args:
        device: "cpu", or the name of the GPU. One of which nothing is known counts as an A100.
    """
    if device == "cpu":
        return 0
    return next((size for name, size in _CONTEXT.items() if name in device), _CONTEXT["A100"])


def _aligned(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
