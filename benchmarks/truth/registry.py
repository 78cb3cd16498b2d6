"""The registry of blocks that random models consist of.

A block is a function or an `nn.Module` class. Its first argument is the hidden state; every
further argument of its forward is an input of the model, sampled by the name of the argument
(`inputs.py`). A block returns the hidden state, or a pair of it and an auxiliary loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

WIDTH = 6
"""Features of a row and of a token, and channels of an image."""

STEPS_OF_TIME = 4
"""Tokens of a sequence."""

SIDE = 4
"""Pixels of an image's side."""

CLASSES = 3
"""Classes of labels."""

Kind = Literal[
    "rows",
    "sequence",
    "image",
    "sequence_pool",
    "image_pool",
    "rows_head",
    "sequence_head",
    "image_head",
]
"""Shape of the hidden state: `(B, WIDTH)`, `(B, STEPS_OF_TIME, WIDTH)` or
`(B, WIDTH, SIDE, SIDE)`. Pools go from one of the latter two to rows, heads to a loss."""


class Stateless(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@dataclass(frozen=True)
class Block:
    """One way to treat the batch.

    Attributes:
        name: name of the function or class.
        theme: file that defines it.
        kind: shape of the hidden state.
        make: makes the module, from the number of rows if `sized`.
        inputs: names of further inputs.
        divides: number that the number of rows must be a multiple of.
        sized: whether parameters or buffers have the shape of the batch.
    """

    name: str
    theme: str
    kind: Kind
    make: Callable[..., nn.Module]
    inputs: tuple[str, ...]
    divides: int = 1
    sized: bool = False

    def module(self, rows: int) -> nn.Module:
        """The module, its parameters drawn from torch's generator."""
        return self.make(rows) if self.sized else self.make()


BLOCKS: dict[str, Block] = {}


def register(kind: Kind, divides: int = 1, sized: bool = False) -> Callable[[Any], Any]:
    """Decorator that registers a function or a class under its name."""

    def add(thing: Any) -> Any:
        is_class = inspect.isclass(thing)
        signature = inspect.signature(thing.forward if is_class else thing)
        names = tuple(signature.parameters)[2 if is_class else 1 :]
        make = thing if is_class else lambda: Stateless(thing)
        theme = thing.__module__.rpartition(".")[2]
        assert thing.__name__ not in BLOCKS, thing.__name__
        BLOCKS[thing.__name__] = Block(thing.__name__, theme, kind, make, names, divides, sized)
        return thing

    return add
