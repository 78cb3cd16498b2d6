"""`Compression`: a lossy codec of messages, and `Compressions`: the codecs of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from autopar.core.common.checks import argument_error, choice, count, flag, number, short_repr
from autopar.errors import StrategyError

CASTS = ("bf16", "fp16")
BLOCKWISE = ("int8", "sign")
SPARSE = ("topk", "randomk", "threshold")
METHODS = (*CASTS, *BLOCKWISE, "powersgd", *SPARSE)
"""All methods, most accurate first."""

MILD = ("bf16", "int8")
"""Methods that `lossy=True` allows."""

ELEMENTWISE = (*CASTS, "int8")
"""Methods that send every element; gathers of parameters must use one of these."""

_OPTIONS: Mapping[str, Callable[[str], object]] = {
    "rank": int,
    "density": float,
    "threshold": float,
    "block": int,
    "feedback": {"True": True, "False": False, "None": None}.__getitem__,
}
"""Parser of each option."""


@dataclass(frozen=True)
class Compression:
    """Compression of one message.

    Attributes:
        method: one of METHODS.
        rank: rank of PowerSGD's approximation.
        density: fraction of elements sent by sparse methods.
        threshold: minimum magnitude of elements sent by "threshold", up to `density` of them.
        block: number of elements that share a scale in int8 and sign.
        feedback: whether the error is added to the next message; None for the default, which is
            False for casts and int8 and True for other methods.
    """

    method: str
    rank: int = 4
    density: float = 0.01
    threshold: float = 0.0
    block: int = 256
    feedback: bool | None = None

    def __post_init__(self) -> None:
        choice("method", self.method, METHODS)
        count("rank", self.rank)
        # The sign codec packs eight elements into a byte.
        if count("block", self.block, 8) % 8:
            raise argument_error("block", self.block, "give a multiple of 8")
        number("density", self.density, "give a number in (0, 1]", 1.0)
        number("threshold", self.threshold, "give a number from 0", zero=True)
        if self.feedback is not None:
            flag("feedback", self.feedback)

    @property
    def feeds_back(self) -> bool:
        """Whether the error is added to the next message."""
        return self.method not in ELEMENTWISE if self.feedback is None else self.feedback

    @staticmethod
    def of(given: str | Compression, name: str = "compression") -> Compression:
        """Parses text such as "int8", "powersgd(rank=2)" or "topk(density=0.001)".

        Raises:
            StrategyError: The text, of the argument `name`, is not a compression.
        """
        if isinstance(given, Compression):
            return given
        match = re.fullmatch(r"(\w+)(?:\((.*)\))?", given.strip())
        options: dict[str, Any] = {}
        for part in filter(None, (match[2] or "").split(",")) if match else ():
            option, _, value = (each.strip() for each in part.partition("="))
            if option not in _OPTIONS or not value:
                match = None
                break
            try:
                options[option] = _OPTIONS[option](value)
            except (KeyError, ValueError) as error:
                unread = f"{option}={short_repr(value)} cannot be read"
                raise argument_error(name, given, unread) from error
        if match is None or match[1] not in METHODS:
            wanted = f"write one of {', '.join(METHODS)}, or as in 'powersgd(rank=2)'"
            raise argument_error(name, given, wanted)
        try:
            return Compression(match[1], **options)
        except StrategyError as error:
            raise StrategyError(f"{name}={short_repr(given)}: {error}") from None

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name != "method" and getattr(self, f.name) != f.default
        ]
        return self.method + (f"({', '.join(changed)})" if changed else "")


@dataclass(frozen=True)
class Compressions:
    """Text of a `Compression` for each bucket, "" for none.

    Attributes:
        gather: compression of each forward gather.
        regather: compression of each backward gather.
        reduce: compression of each bucket of gradients.
        activations: compression of activations between ranks of a partition and between stages.
    """

    gather: tuple[str, ...] = ()
    regather: tuple[str, ...] = ()
    reduce: tuple[str, ...] = ()
    activations: str = ""

    def __bool__(self) -> bool:
        return any((*self.gather, *self.regather, *self.reduce, self.activations))
