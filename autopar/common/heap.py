"""`return_freed_memory`: large blocks go back to the system as soon as they are freed."""

from __future__ import annotations

import ctypes
import functools

LARGE = 1 << 20
KEPT = 4 << 20

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


@functools.cache
def return_freed_memory() -> None:
    """Has glibc map every block of 1 MiB and more by itself, in the whole process.

    By default it keeps freed blocks of up to 32 MiB in its heap. Blocks that come and go in many
    sizes leave holes there, and the process grows to several times the memory in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGE)
        mallopt(_TRIM_THRESHOLD, KEPT)
