"""Requests to the system about large blocks of memory."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

LARGE = 1 << 20
KEPT = 4 << 20

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)  # of Linux


@functools.cache
def return_freed_memory() -> None:
    """Has glibc map every block of 1 MiB and more by itself, in the whole process.

    By default it keeps freed blocks of up to 32 MiB in its heap. Blocks that come and go in many
    sizes leave holes there, and the process grows to several times the memory in use.
    """
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, KEPT)


def use_huge_pages(address: int, size: int) -> None:
    """Asks for pages of 2 MiB, which the kernel makes faster than as many bytes in 4 KiB.

    `address` is a multiple of the page size, and `size` is in bytes. Nothing happens where the
    system has no such pages.
    """
    if _HUGE_PAGES is not None:
        _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _HUGE_PAGES)


@functools.cache
def _libc() -> Any:
    """The C library of this process."""
    return ctypes.CDLL(None)
