"""JSON documents, checked against the class that they describe, and files that are written.

msgspec checks field names, types, and limits in `Annotated` types such as `Count`. `read` also
refuses deep nesting, NaN, infinities, integers of more than 64 bits, and unknown fields. Every
error names the file, the path of the field and its value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from autopar.core.common.checks import MAX_RANKS, short_repr
from autopar.core.common.files import read_json
from autopar.errors import AutoparError

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
Amount = Annotated[float, msgspec.Meta(ge=0.0)]
Seconds = Annotated[float, msgspec.Meta(ge=-1e-6, le=1e12)]  # differences may round below zero
Duration = Annotated[float, msgspec.Meta(gt=0.0, le=1e12)]
Rate = Annotated[float, msgspec.Meta(gt=0.0)]


class Text:
    """A value that documents hold as the text that it prints as."""

    @classmethod
    def of(cls, text: str) -> Text:
        """The value that prints as `text`; raises ValueError if none does."""
        raise NotImplementedError


MAX_DEPTH = 32
"""Most levels of lists and objects in a document."""

MAX_INT_BITS = 63
"""Most bits of an integer in a document."""


class FieldError(ValueError):
    """A field, such as "$.mesh[0]", that contradicts other fields of its document."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}")


def load(path: str | Path, what: str, error: type[AutoparError]) -> Any:
    """The JSON values in a file that should be a `what`, such as "plan".

    Raises:
        AutoparError: the file cannot be read or is not JSON.
    """
    if not isinstance(path, (str, Path)):
        raise error(f"path={short_repr(path)}: give the name of a file")
    try:
        return read_json(path)
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}") from failure
    except ValueError as failure:
        raise error(f"{path} is not a {what}, or not JSON: {failure}") from failure


def write_text(path: str | Path, text: str, error: type[AutoparError]) -> None:
    """Writes a file in UTF-8, such as a plan.

    Raises:
        AutoparError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as failure:  # ValueError: a NUL or half of a pair in the name
        reason = getattr(failure, "strerror", None) or "no name of a file"
        raise error(f"cannot write {path}: {reason}. Give another file.") from failure


def as_text(value: Any) -> str:
    """The JSON text of a dataclass, in one line."""

    def plain(inner: Any) -> Any:
        if isinstance(inner, Text):
            return str(inner)
        return {field.name: getattr(inner, field.name) for field in fields(inner)}

    return json.dumps(value, default=plain)


def parsed(kind: type[Text], text: Any) -> Text:
    """The value of a class that prints as `text`; raises ValueError if none does."""
    try:
        value = kind.of(text) if isinstance(text, str) else None
    except ValueError:
        value = None
    if value is None or str(value) != text:
        raise ValueError(f"cannot be read as {kind.__name__}")
    return value


def read(
    document: Any,
    kind: type[T],
    source: str,
    error: type[AutoparError],
    advice: str,
    check: Callable[[T], None] = lambda value: None,
) -> T:
    """The value of a dataclass or struct that JSON values describe.

    Errors name `source` and end with `advice`. `check` raises `FieldError` if fields contradict
    each other.

    Raises:
        AutoparError: a field is missing, unknown or invalid.
    """
    try:
        _check_plain(document)
        value = msgspec.convert(document, kind, dec_hook=parsed)
        _check_known(document, value, "$")
        check(value)
    except FieldError as failure:
        raise error(f"{source}: {failure}. {advice}") from None
    except msgspec.ValidationError as failure:
        raise error(f"{source}: {_explained(str(failure), document)}. {advice}") from failure
    return value


def _check_plain(document: Any) -> None:
    """Raises if a document is too deep, or holds a number or text outside of JSON."""
    pending: list[tuple[Any, _Place | None, int]] = [(document, None, 0)]
    while pending:
        value, place, depth = pending.pop()
        if isinstance(value, (dict, list, tuple)):
            if depth == MAX_DEPTH:
                raise FieldError(_path(place)[:60], f"is nested deeper than {MAX_DEPTH} levels")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(inner, (place, key), depth + 1) for key, inner in items]
        elif isinstance(value, float) and value - value != 0.0:
            raise FieldError(_path(place), f"is {value}: expected a finite number")
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            size = f"{value.bit_length()} bits: expected at most {MAX_INT_BITS}"
            raise FieldError(_path(place), f"is an integer of {size}")
        elif isinstance(value, str) and _HALF.search(value):
            raise FieldError(_path(place), f"is {ascii(value)[:60]}, which is not Unicode text")


_HALF = re.compile("[\ud800-\udfff]")
_Place = tuple[Any, Any]
"""Location of a value: the location of its container, and its key there."""


def _path(place: _Place | None) -> str:
    parts: list[str] = []
    while place is not None:
        place, key = place
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "$" + "".join(reversed(parts))


def _check_known(document: Any, value: Any, path: str) -> None:
    """Raises if a document has a field that the value's class lacks."""
    # msgspec can refuse unknown fields of its Structs, but not of dataclasses.
    if is_dataclass(value) and isinstance(document, Mapping):
        names = [field.name for field in fields(value)]
        if strange := sorted(set(map(str, document)).difference(names)):
            raise FieldError(path, f"has the unknown field {strange[0]!r}")
        for name in names:
            if name in document:
                _check_known(document[name], getattr(value, name), f"{path}.{name}")
    elif isinstance(value, (tuple, list)) and any(map(is_dataclass, value)):
        for index, (inner, own) in enumerate(zip(document, value, strict=True)):
            _check_known(inner, own, f"{path}[{index}]")


_AT = re.compile(r"(.*) - at `(.*)`", re.DOTALL)


def _explained(failure: str, document: Any) -> str:
    """Msgspec's message, with the path first and the value found there."""
    match = _AT.fullmatch(failure)
    what, path = (match[1], match[2]) if match else (failure, "$")
    found = _value_at(path, document)
    plain = found is None or isinstance(found, (bool, int, float, str)) or found in ([], {})
    text = f" is {short_repr(found)}" if plain and not what.startswith("Object") else ""
    return f"{path}{text}: {what[:1].lower()}{what[1:]}"


def _value_at(path: str, document: Any) -> Any:
    """The value at one of msgspec's paths; Ellipsis if the path leaves a key open."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            return ...
        document = document[name] if name else document[int(index)]
    return document
