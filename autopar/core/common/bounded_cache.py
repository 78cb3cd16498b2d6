"""`BoundedCache`: a cache that drops the least recently used entry when it is full."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCache(Generic[T]):
    """Values by key, in the order of their last use.

    Attributes:
        added: number of values added so far, dropped ones included.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, T] = {}
        self.added = 0

    def get(self, key: Hashable) -> T | None:
        """The value of a key, which is now the most recently used; None if there is none."""
        value = self._values.pop(key, None)
        if value is not None:
            self._values[key] = value
        return value

    def add(self, key: Hashable, value: T, size: int) -> T:
        """Adds a value, and drops the least recently used ones beyond `size`."""
        self._values[key] = value
        self.added += 1
        while len(self._values) > size:
            del self._values[next(iter(self._values))]
        return value

    def values(self) -> Iterator[T]:
        return iter(self._values.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses Python's garbage collector, which would walk all graphs while new ones are made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
