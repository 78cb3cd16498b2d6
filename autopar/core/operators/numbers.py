"""`Numbered`: values that tensors of one number stand for in a graph."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Numbered(Generic[T]):
    """Values by their numbers. A value is forgotten when its number's tensor is gone."""

    def __init__(self, forget: Callable[[T], object] | None = None) -> None:
        """Holds no values yet.

        Args:
            forget: called with each value whose number is gone.
        """
        self._values: dict[int, T] = {}
        self._numbers = itertools.count(1)
        self._forget = forget

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: T) -> Tensor:
        """A new tensor of shape [1], dtype int64, that stands for a value."""
        key = next(self._numbers)
        self._values[key] = value
        # torch holds the memoryview as long as any tensor has its memory. The tensor that is
        # returned may go earlier, and a bytearray takes no weak references.
        memory = memoryview(bytearray(key.to_bytes(8, "little")))
        weakref.finalize(memory, self._drop, key).atexit = False
        return torch.frombuffer(memory, dtype=torch.int64)

    def __getitem__(self, number: Tensor) -> T:
        return self._values[int(number)]

    def pop(self, number: Tensor) -> T:
        """Gives out the value of a number, which no longer stands for it."""
        return self._values.pop(int(number))

    def _drop(self, key: int) -> None:
        if key in self._values:
            value = self._values.pop(key)
            if self._forget is not None:
                self._forget(value)


def number_like(value: Tensor, *_: Any) -> Tensor:
    """A fake tensor like a number's, from a fake tensor."""
    return value.new_empty((1,), dtype=torch.int64, device="cpu")
