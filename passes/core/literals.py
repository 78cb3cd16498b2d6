"""Values as Python expressions: literals and constructor calls, read with `ast`, never run."""

from __future__ import annotations

import ast
import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import torch

from autopar.core.common.documents import Text
from autopar.errors import PassError

Constructors = Mapping[str, Callable[..., Any]]
_BUILT_IN = {"device": torch.device, "float": float, "frozenset": frozenset, "slice": slice}
_TORCH = (torch.dtype, torch.layout, torch.memory_format)


def constructors_in(annotations: Iterable[Any]) -> dict[str, type]:
    """The dataclasses and enumerations that annotations name, and those of their fields.

    A class such as `Placement` stands for its subclasses, too.
    """
    found: dict[str, type] = {}
    pending = list(annotations)
    while pending:
        annotation = pending.pop()
        pending += get_args(annotation)
        if isinstance(annotation, type) and annotation.__name__ not in found:
            if issubclass(annotation, Text):
                pending += annotation.__subclasses__()
            if is_dataclass(annotation):
                pending += field_types(annotation)
            elif not issubclass(annotation, enum.Enum):
                continue
            found[annotation.__name__] = annotation
    return found


def field_types(kind: type) -> list[Any]:
    """The annotations of the fields of a dataclass."""
    annotations = get_type_hints(kind)
    return [annotations[field.name] for field in fields(kind)]


def write(value: Any, other: Callable[[Any], str] = repr) -> str:
    """A value as a Python expression that `read` understands.

    Args:
        value: nested collections of literals, enumerations, dataclasses, dtypes and devices.
        other: text of a value of any other type.
    """

    def items(values: Iterable[Any]) -> str:
        return ", ".join(write(item, other) for item in values)

    match value:
        case None | bool():
            return repr(value)
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case float() if not math.isfinite(value):
            return f"float({str(value)!r})"
        case int() | float() | str():
            # A subclass such as `UnevenRanks` would read back as a plain number.
            if type(value) in (int, float, str):
                return repr(value)
            return f"{type(value).__name__}({items(value.__getnewargs__())})"
        case tuple():
            return f"({items(value)}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{items(value)}]"
        case frozenset():
            return f"frozenset([{', '.join(sorted(write(item, other) for item in value))}])"
        case Mapping():
            pairs = (f"{write(k, other)}: {write(v, other)}" for k, v in value.items())
            return "{" + ", ".join(pairs) + "}"
        case slice():
            return f"slice({items((value.start, value.stop, value.step))})"
        case torch.device():
            return f"device({str(value)!r})"
    if isinstance(value, _TORCH):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        options = (f"{f.name}={write(getattr(value, f.name), other)}" for f in fields(value))
        return f"{type(value).__name__}({', '.join(options)})"
    return other(value)


def read(text: str, constructors: Constructors) -> Any:
    """The value of an expression that may call `constructors` by name.

    Raises:
        PassError: the text is no expression, or calls something else.
    """

    def value(tree: ast.expr) -> Any:
        match tree:
            case ast.Constant(constant):
                return constant
            case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
                return -number
            case ast.Tuple(items):
                return tuple(map(value, items))
            case ast.List(items):
                return list(map(value, items))
            case ast.Dict(keys, items) if None not in keys:
                return dict(zip(map(value, keys), map(value, items), strict=True))  # type: ignore[arg-type]
            case ast.Attribute(ast.Name("torch"), name):
                if isinstance(found := getattr(torch, name), _TORCH):
                    return found
            case ast.Attribute(ast.Name(name), member):
                if isinstance(kind := constructors.get(name), enum.EnumType):
                    return kind[member]
            case ast.Call(ast.Name(name), arguments, options):
                if call := _BUILT_IN.get(name) or constructors.get(name):
                    given = {option.arg: value(option.value) for option in options if option.arg}
                    return call(*map(value, arguments), **given)
                known = ", ".join(sorted(constructors))
                raise ValueError(f"{name} is unknown; known are {known}")
        raise ValueError(f"{ast.unparse(tree)} is neither a literal nor a known constructor")

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, KeyError, AttributeError) as failure:
        raise PassError(f"cannot read {text.strip()[:200]!r}: {failure}") from failure
