"""`BlockStorage`: blocks of bytes in a file without a name, read and written by threads.

The kernel frees the file when its process ends, however it ends. Transfers bypass the page cache
where the file system allows it (O_DIRECT), and so start and end at multiples of `PAGE`.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopar.core.common.heap import return_freed_memory
from autopar.errors import OffloadError

Memory = mmap.mmap | memoryview
Ready = Callable[[], object]
"""Waits until memory may be read or filled."""

PAGE = mmap.PAGESIZE
PIECE = 4 << 20
"""Bytes that are copied at once to where direct transfers may start."""

BUFFERS = 4
"""Blocks of states in memory at once: one is read, one is stepped, and two are written in turn.

With one to be written the next read would wait for it, 9 % of a step.
"""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def round_up(size: int, unit: int = PAGE) -> int:
    """The next multiple of `unit`."""
    return -(-size // unit) * unit


def split_blocks(sizes: Sequence[int], block_bytes: int) -> Iterator[range]:
    """Indices of neighbours with at most `block_bytes` together, by their sizes in bytes.

    A block of a few bytes between large ones would leave the storage idle while these are stepped.
    So there is room for small neighbours beside the largest one.
    """
    limit = max(block_bytes, max(sizes, default=0) * 17 // 16)
    first = filled = 0
    for index, size in enumerate(sizes):
        if index > first and filled + size > limit:
            yield range(first, index)
            first, filled = index, 0
        filled += size
    if sizes:
        yield range(first, len(sizes))


@dataclass(eq=False)
class Extent:
    """A preallocated range of the file, in bytes.

    Attributes:
        checksum: CRC-32 of its content; None if it is not checked.
        writing: the write under way, if any.
    """

    offset: int
    size: int
    checksum: int | None = None
    writing: Future[None] | None = None


class BlockStorage:
    """Extents of one anonymous file.

    Args:
        folder: folder on the storage to use.
        checked: compare a checksum of every extent that is read.

    Raises:
        OffloadError: the folder does not exist or cannot be written.
    """

    def __init__(self, folder: Path, checked: bool = False) -> None:
        return_freed_memory()
        self.folder, self.checked = folder, checked
        self.size = 0
        self._free: dict[int, list[Extent]] = {}
        self._file = _open_anonymous(folder)
        # O_DIRECT needs memory that starts at a page, as a mapping does.
        self._piece = np.frombuffer(mmap.mmap(-1, PIECE), np.uint8)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="autopar-offload-read")
        # One writer, since writes that are copied on the way share `_piece`.
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="autopar-offload-write")

    def allocate(self, size: int) -> Extent:
        """An extent of at least `size` bytes, one that was given back if it has that size.

        Raises:
            OffloadError: the disk is full.
        """
        if known := self._free.get(round_up(size)):
            return known.pop()
        extent = Extent(self.size, round_up(size))
        try:
            os.posix_fallocate(self._file, extent.offset, extent.size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of file systems without it
                raise self._explain(error, extent.size) from error
        self.size += extent.size
        return extent

    def give_back(self, extent: Extent) -> None:
        """Lets another use of an extent follow; its content is lost."""
        self._free.setdefault(extent.size, []).append(extent)

    def read(self, extent: Extent, buffer: Memory, after: Ready | None = None) -> Future[None]:
        """Reads an extent into the start of a buffer, once its last write is done."""
        return self._readers.submit(self._read, extent, buffer, extent.writing, after)

    def write(self, extent: Extent, buffer: Memory, after: Ready | None = None) -> Future[None]:
        """Writes the start of a buffer to an extent; the buffer may change when it is done.

        A buffer that does not start at a page, or that is shorter than the extent, is copied on
        the way, in pieces of `PIECE` bytes, and not checked.
        """
        extent.writing = self._writers.submit(self._write, extent, memoryview(buffer), after)
        return extent.writing

    def map(self, extent: Extent) -> mmap.mmap:
        """An extent that was written once, as memory whose changes the kernel writes."""
        return mmap.mmap(self._file, extent.size, offset=extent.offset)

    def settle(self, extent: Extent, mapped: mmap.mmap) -> None:
        """Begins to write changes of a mapped extent; its memory goes back to the system."""
        mapped.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self._file, extent.offset, extent.size, os.POSIX_FADV_DONTNEED)

    def _read(
        self, extent: Extent, buffer: Memory, before: Future[None] | None, after: Ready | None
    ) -> None:
        if before is not None:
            before.result()
        if after is not None:
            after()
        view, done = memoryview(buffer)[: extent.size], 0
        try:
            while done < extent.size:
                count = os.preadv(self._file, [view[done:]], extent.offset + done)
                if not count:
                    raise OSError(errno.EIO, "the file was cut short")
                done += count
        except OSError as error:
            raise self._explain(error, extent.size) from error
        if extent.checksum is not None and zlib.crc32(view) != extent.checksum:
            raise OffloadError(
                f"offloaded bytes in {self.folder} differ from what was written there "
                f"({extent.size} bytes at {extent.offset}): the storage is faulty. "
                "Resume from a checkpoint elsewhere."
            )

    def _write(self, extent: Extent, given: memoryview, after: Ready | None) -> None:
        if after is not None:
            after()
        view = given[: extent.size]
        address = np.frombuffer(view, np.uint8).ctypes.data
        direct = address % PAGE == 0 and len(view) == extent.size
        if self.checked and direct:
            extent.checksum = zlib.crc32(view)
        try:
            if direct:
                self._write_at(extent.offset, view)
            for start in range(0, 0 if direct else len(view), PIECE):
                piece = view[start : start + PIECE]
                np.copyto(self._piece[: len(piece)], piece)  # without the GIL
                whole = self._piece[: round_up(len(piece))].data
                self._write_at(extent.offset + start, whole)
        except OSError as error:
            raise self._explain(error, extent.size) from error

    def _write_at(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += os.pwritev(self._file, [view[done:]], offset + done)

    def _explain(self, error: OSError, size: int) -> OffloadError:
        free = shutil.disk_usage(self.folder).free
        if error.errno in _NO_ROOM:
            advice = "give a folder with more room"
        else:
            advice = "its storage fails, or something changed the file. Resume from a checkpoint"
        return OffloadError(
            f"{size} offloaded bytes cannot be kept in {self.folder} "
            f"({error.strerror}; {free} bytes are free): {advice}"
        )


def _open_anonymous(folder: Path) -> int:
    """A file without a name in a folder, past the page cache where the file system can."""
    # O_EXCL keeps others from giving the file a name, by which they could change it.
    flags = os.O_TMPFILE | os.O_RDWR | os.O_EXCL
    try:
        for more in (os.O_DIRECT, 0):
            try:
                return os.open(folder, flags | more, 0o600)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
        with tempfile.TemporaryFile(dir=folder) as file:  # a file system without O_TMPFILE
            return os.dup(file.fileno())
    except OSError as error:
        raise OffloadError(
            f"no file can be made in {folder} ({error.strerror}): give a folder that exists and "
            "can be written"
        ) from error
