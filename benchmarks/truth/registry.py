"""Registry of the blocks that random models consist of.

The first argument of a block is the hidden state, after `m` if it has state: a module that holds
the parts named at its registration, of which `unsaved` is a buffer that is not saved. Each further
argument is an input of the model, sampled by name (`inputs.py`). A block returns the hidden state,
or a pair of it and an auxiliary loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

WIDTH = 6  # features of a row and of a token, channels of an image
TIME_STEPS = 4  # tokens of a sequence
SIDE = 4  # height and width of an image
CLASSES = 3  # of labels

Kind = str
"""Shape of the hidden state: "rows" `(B, WIDTH)`, "sequence" `(B, TIME_STEPS, WIDTH)` or "image"
`(B, WIDTH, SIDE, SIDE)`; "sequence_pool" maps to rows, "rows_head" to a loss, and so on."""

Parts = Mapping[str, Callable[..., Any]]
"""Name -> factory of a submodule, a parameter, a buffer (any other tensor) or a Python value."""


class Function(nn.Module):
    """A function of this module, with the parts that it reads and changes."""

    def __init__(self, function: Callable[..., Any], parts: Parts, *sizes: int) -> None:
        super().__init__()
        self.function = function
        for name, make in parts.items():
            value = make(*sizes)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=name != "unsaved")
            else:
                setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


@dataclass(frozen=True)
class Block:
    """One treatment of the batch."""

    name: str
    kind: Kind
    make: Callable[..., nn.Module]
    inputs: tuple[str, ...]
    plain: bool = False  # each row is treated by itself, with nothing unusual
    divides: int = 1  # divisor of every valid number of rows
    sized: bool = False  # parameters or buffers have the shape of the batch

    def module(self, rows: int) -> nn.Module:
        """Return the module, its parameters drawn from torch's generator."""
        return self.make(rows) if self.sized else self.make()


BLOCKS: dict[str, Block] = {}


def define(kind: Kind, name: str, block: Any, parts: Parts | None = None, **options: Any) -> None:
    """Register a function under a name, with factories of the attributes of `m`.

    `options` are further fields of `Block`.
    """
    arguments = list(inspect.signature(block).parameters)
    stateful = arguments[0] == "m"
    function = block if stateful else lambda m, *args: block(*args)
    make = partial(Function, function, parts or {})
    assert name not in BLOCKS, name
    BLOCKS[name] = Block(name, kind, make, tuple(arguments[1 + stateful :]), **options)


def define_all(kind: Kind, functions: Mapping[str, Callable[..., Any]], **options: Any) -> None:
    for name, function in functions.items():
        define(kind, name, function, **options)


def register(
    kind: Kind, *, plain: bool = False, divides: int = 1, sized: bool = False, **parts: Any
) -> Callable[[Any], Any]:
    """Decorator form of `define`, under the name of the function."""

    def add(block: Any) -> Any:
        define(kind, block.__name__, block, parts, plain=plain, divides=divides, sized=sized)
        return block

    return add


def linear(inputs: int = WIDTH, outputs: int = WIDTH, **options: Any) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(inputs, outputs, **options)
