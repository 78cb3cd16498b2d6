"""Files that another process wrote: regular ones of a bounded size, opened without waiting.

A pipe would wait for its writer, and a device may never end. Links are followed; whoever takes
their names from a file's content checks where they lead.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from autopar.formatting import human_bytes

T = TypeVar("T")

MAX_BYTES = 1 << 26
"""Most bytes of a document or a log, 64 MiB."""

_DEEP = "$ is nested deeper than Python can read"


def open_file(path: str | Path, most_bytes: int | None = None) -> IO[bytes]:
    """A regular file to read.

    Raises:
        OSError: it is something else, is larger than `most_bytes`, or cannot be opened.
    """
    try:
        _check(os.stat(path), most_bytes)  # opening a device may already act on it
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no name of a file") from error
    try:
        _check(os.fstat(descriptor), most_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def _check(found: os.stat_result, most_bytes: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise _too_large(most_bytes)


def read_file(path: str | Path, most_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it is something else, is larger than `most_bytes`, or cannot be read.
    """
    with open_file(path, most_bytes) as file:
        content = file.read(most_bytes + 1)  # files of /proc have no size
    if len(content) > most_bytes:
        raise _too_large(most_bytes)
    return content


def read_json(path: str | Path, most_bytes: int = MAX_BYTES) -> Any:
    """The JSON values in a regular file.

    Raises:
        OSError: as of `read_file`.
        ValueError: the content is not JSON in UTF-8, or nested too deep for Python.
    """
    try:
        return json.loads(read_file(path, most_bytes).decode("utf-8"))
    except RecursionError as error:
        raise ValueError(_DEEP) from error


def read_typed(path: str | Path, kind: type[T]) -> T:
    """The JSON value of a type that msgspec knows, in a regular file.

    Raises:
        OSError: as of `read_file`.
        ValueError: the content is not JSON, or not of the type.
    """
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except RecursionError as error:
        raise ValueError(_DEEP) from error


def _too_large(most_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"larger than {human_bytes(most_bytes)}")
