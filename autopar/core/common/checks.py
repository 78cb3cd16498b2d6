"""Checks of arguments: each returns the value, or raises an error that names the argument."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from autopar.errors import AutoparError, StrategyError

P = ParamSpec("P")
R = TypeVar("R")

MAX_RANKS = 2**20
"""Largest world size."""

MAX_BYTES = 2**62
"""Largest memory, bucket and message, in bytes."""

MAX_SECONDS = 1e8
"""Largest time limit in seconds: three years."""

UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{letter + "b": 1000 ** (power + 1) for power, letter in enumerate("kmgt")},
    **{letter + "ib": 1024 ** (power + 1) for power, letter in enumerate("kmgt")},
    **{letter: 1024 ** (power + 1) for power, letter in enumerate("kmgt")},
}
"""Bytes of each unit in lower case: "KB" is 1000; "KiB" and a bare "K" are 1024."""


def short_repr(value: object) -> str:
    """The repr of a value for error messages: one line of at most 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # huge integers, self-referential lists
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def demand(
    ok: object, name: str, value: Any, wanted: str, error: type[AutoparError] = StrategyError
) -> Any:
    """The value if it is `ok`, else the error of `argument_error`."""
    if not ok:
        raise argument_error(name, value, wanted, error)
    return value


def argument_error(
    name: str, value: object, wanted: str, error: type[AutoparError] = StrategyError
) -> AutoparError:
    """The error for an argument, with its name, its value and the expected value."""
    return error(f"{name}={short_repr(value)}: {wanted}")


def count(
    name: str,
    value: Any,
    minimum: int = 1,
    maximum: int = MAX_RANKS,
    error: type[AutoparError] = StrategyError,
) -> int:
    """A whole number from `minimum` to `maximum`."""
    ok = _is_whole(value) and minimum <= value <= maximum
    return demand(ok, name, value, f"give a whole number from {minimum} to {maximum}", error)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def nbytes(name: str, value: Any, *, bare: bool = False) -> int:
    """A number of bytes, as an int or a text such as "24GiB".

    Units may have any case, with or without a space before them. "KB" to "TB" are powers of 1000,
    "KiB" to "TiB" powers of 1024. A single letter is a power of 1024, as in Docker: "20G"
    is 20 GiB (Kubernetes reads it as 20 GB). A `bare` text may lack its unit.
    """
    found: Any = _bytes_in(value, bare) if isinstance(value, str) else value
    ok = _is_whole(found) and 1 <= found <= MAX_BYTES
    demand(ok, name, value, "give bytes as a whole number, or a text such as '24GiB'")
    return int(found)


def _bytes_in(text: str, bare: bool) -> int | None:
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", text.lower(), re.ASCII)
    if match is None or match[2] not in UNITS or not (match[2] or bare):
        return None
    unit = UNITS[match[2]]
    return None if unit == 1 and "." in match[1] else int(float(match[1]) * unit)


def seconds(
    name: str, value: Any, *, zero: bool = False, error: type[AutoparError] = StrategyError
) -> float:
    """A positive number of seconds, or zero if allowed."""
    wanted = f"give {'seconds from 0' if zero else 'a positive number of seconds'}"
    return number(name, value, wanted, MAX_SECONDS, zero=zero, error=error)


def number(
    name: str,
    value: Any,
    wanted: str,
    maximum: float = math.inf,
    *,
    zero: bool = False,
    error: type[AutoparError] = StrategyError,
) -> float:
    """A positive finite number up to `maximum`, or zero if allowed."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    positive = real and (value > 0 or (zero and value == 0))
    return demand(positive and value <= maximum and value < math.inf, name, value, wanted, error)


def choice(
    name: str,
    value: Any,
    choices: Iterable[str],
    more: str = "",
    error: type[AutoparError] = StrategyError,
) -> Any:
    """One of some names; the error for another names `more` values and suggests the closest."""
    names = tuple(choices)
    if isinstance(value, str) and value in names:
        return value
    meant = _meant(value, names) if isinstance(value, str) else ""
    raise argument_error(name, value, f"choose {', '.join(names)}{more}{meant}", error)


def suggests_names(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose TypeError for an unknown keyword suggests the closest one."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                title = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{title}() has no argument {name!r}{_meant(name, names)}")
        return function(*args, **kwargs)

    return checked


def suggests_fields(dataclass: type[R]) -> type[R]:
    """A dataclass whose TypeError for an unknown field suggests the closest one."""
    dataclass.__init__ = suggests_names(dataclass.__init__)  # type: ignore[method-assign]
    return dataclass


def _meant(value: str, names: Iterable[str]) -> str:
    near = get_close_matches(value, names, 1, 0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def flag(name: str, value: Any, error: type[AutoparError] = StrategyError) -> bool:
    """True or False, not merely a truthy value."""
    return demand(isinstance(value, bool), name, value, "give True or False", error)


def text(name: str, value: Any, wanted: str, error: type[AutoparError] = StrategyError) -> str:
    """A text that is not blank."""
    return demand(isinstance(value, str) and value.strip(), name, value, wanted, error)


def texts(name: str, value: Any, wanted: str) -> tuple[str, ...]:
    """A list or tuple of names, not a single text."""
    plain = isinstance(value, (list, tuple))
    ok = plain and all(isinstance(each, str) and each for each in value)
    return tuple(demand(ok, name, value, wanted))
