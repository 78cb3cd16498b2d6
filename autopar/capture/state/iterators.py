"""`iterators_in`: iterators that forward read, whose position no guard can compare.

A graph would repeat the values that an iterator gave while it was captured. Those of itertools tell
nobody where they are since Python 3.14, so that a change of them is not seen either.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from autopar.capture.state.contents import (
    MAX_COMPARED,
    Found,
    ValuePath,
    containers,
    find_containers,
    items,
    leaves,
)


def iterators_in(value: Any) -> Iterator[Any]:
    """The value itself if it is an iterator, and those inside of it that do not show their state.

    Files are no iterators here: forward may write to a log.
    """
    if _is_iterator(value):
        yield value
    found: Found = {}
    find_containers(value, ValuePath("", ("",)), found, MAX_COMPARED)
    inside = [part for container, _ in found.values() for _, part in items(container)]
    for part in leaves((value, *inside)):
        if part is not value and _is_iterator(part) and not _shows_state(part):
            yield part


def _is_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _shows_state(iterator: Any) -> bool:
    # a generator that has ended shows nothing, and gives nothing
    return isinstance(iterator, GeneratorType) or any(map(items, containers(iterator)))
