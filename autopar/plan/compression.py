"""`Compression`: how what is sent is made smaller, and `Compressions`: where a plan does so."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from autopar.common.checks import argument_error, choice, count, flag, number, short_repr
from autopar.errors import StrategyError

CASTS = ("bf16", "fp16")
BLOCKWISE = ("int8", "sign")
SPARSE = ("topk", "randomk", "threshold")
METHODS = (*CASTS, *BLOCKWISE, "powersgd", *SPARSE)
"""The methods, from the nearest to what is sent without."""

MILD = ("bf16", "int8")
"""What `lossy=True` allows: 500 steps of training came out within 0.5 % (benchmarks/results)."""

ELEMENTWISE = (*CASTS, "int8")
"""What also serves parameters: nothing is left out, so nothing has to be sent later."""


@dataclass(frozen=True)
class Compression:
    """How a message is made smaller.

    Attributes:
        method: one of METHODS.
        rank: of PowerSGD's approximation.
        density: part of the elements that sparse methods send.
        threshold: magnitude that an element must exceed to be sent, of the method of that name;
            it sends at most `density` of them.
        block: elements that share a scale, of int8 and sign.
        feedback: whether what is lost is added to the next message; None where the method is
            biased by more than rounding: everywhere but in casts and int8.
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
        if count("block", self.block, 8) % 8:
            raise argument_error("block", self.block, "give a multiple of 8")
        number("density", self.density, "give a number in (0, 1]", 1.0)
        number("threshold", self.threshold, "give a number from 0", zero=True)
        if self.feedback is not None:
            flag("feedback", self.feedback)

    @property
    def feeds_back(self) -> bool:
        """Whether what is lost is added to the next message."""
        return self.method not in ELEMENTWISE if self.feedback is None else self.feedback

    @staticmethod
    def of(given: str | Compression, name: str = "compression") -> Compression:
        """What a user or a plan wrote: "int8", "powersgd(rank=2)", "topk(density=0.001)".

        Args:
            given: the text.
            name: of the argument, for errors.

        Raises:
            StrategyError: it is none of these.
        """
        if isinstance(given, Compression):
            return given
        match = re.fullmatch(r"(\w+)(?:\((.*)\))?", given.strip())
        types = {f.name: f for f in fields(Compression)}
        options: dict[str, object] = {}
        for part in filter(None, (match[2] or "").split(",")) if match else ():
            option, _, value = (each.strip() for each in part.partition("="))
            if option not in types or option == "method" or not value:
                match = None
                break
            options[option] = _value(option, value, name, given)
        if match is None or match[1] not in METHODS:
            wanted = f"write one of {', '.join(METHODS)}, or as in 'powersgd(rank=2)'"
            raise argument_error(name, given, wanted)
        try:
            return Compression(match[1], **options)  # type: ignore[arg-type]
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
    """Where a plan compresses: text of a `Compression` for each bucket, "" for none.

    Attributes:
        gather: of each bucket of gathers in the forward.
        regather: of each bucket of gathers in the backward.
        reduce: of each bucket of gradients.
        activations: of all that travels between parts of a partitioned model, and between stages.
    """

    gather: tuple[str, ...] = ()
    regather: tuple[str, ...] = ()
    reduce: tuple[str, ...] = ()
    activations: str = ""

    def __bool__(self) -> bool:
        return any((*self.gather, *self.regather, *self.reduce, self.activations))


def _value(option: str, text: str, name: str, given: str) -> object:
    try:
        if option == "feedback":
            return {"True": True, "False": False, "None": None}[text]
        return int(text) if option in ("rank", "block") else float(text)
    except (KeyError, ValueError) as error:
        raise argument_error(name, given, f"{option}={short_repr(text)} cannot be read") from error
