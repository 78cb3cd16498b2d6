"""`HiddenParts`: what a Python object holds outside of its dict and its items.

These are values of slots, bytes of a buffer, the value of a context variable, the object behind a
partial or method, and what an object of Python's library or numpy gives to pickle.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import sys
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import (
    FrameType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
)
from typing import Any

import torch
from torch import nn

Items = list[tuple[Any, Any]]
Reader = Callable[[Any], Items]

_FOLLOWED_ELSEWHERE = (
    *(type(None), int, float, complex, str, bytes, tuple, type, frozenset, torch.Tensor, nn.Module),
    *(FunctionType, torch.dtype, torch.device, torch.Generator),
)
_NATIVE = (dict, list, set, deque)
_TORCH = ("torch", "autopar")
_NAMED = ("logging", "threading")
"""Modules whose objects are pickled by their names, or not at all."""


class Unset:
    """The value of an empty slot or context variable."""

    def __repr__(self) -> str:
        return "nothing"


UNSET = Unset()


class Pickled(tuple[Any, ...]):
    """An object as it gives itself to pickle: made anew at each read, and compared by value."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class HiddenParts:
    """The hidden parts of a value."""

    value: Any
    read: Reader

    def items(self) -> Items:
        return self.read(self.value)

    def restore(self, items: Items) -> None:
        """Writes earlier parts back, where the value allows it."""
        for key, part in items:
            if isinstance(key, MemberDescriptorType):
                with contextlib.suppress(AttributeError, TypeError):  # a slot of C, read-only
                    key.__delete__(self.value) if part is UNSET else key.__set__(self.value, part)
            elif isinstance(key, ContextVar) and part is not UNSET:
                key.set(part)
            elif key is bytes and part and not (now := memoryview(self.value)).readonly:
                now.cast("B")[:] = part


def hidden_parts(value: Any) -> HiddenParts | None:
    """The hidden parts of a value, None where it has none."""
    kind = type(value)
    if issubclass(kind, _FOLLOWED_ELSEWHERE):
        return None
    if not issubclass(kind, _NATIVE) and _is_buffer(value):
        return HiddenParts(value, _bytes)
    reader = _reader_of(kind)  # type: ignore[arg-type]
    return None if reader is None else HiddenParts(value, reader)


@functools.lru_cache(maxsize=4096)
def _reader_of(kind: type[Any]) -> Reader | None:
    """A reader of the hidden parts of a type's objects, but for bytes."""
    for special, reader in _READERS.items():
        if issubclass(kind, special):
            return reader
    package = kind.__module__.partition(".")[0]
    if package in _TORCH:
        return None
    if package in sys.stdlib_module_names or package == "numpy":
        calls = any("__call__" in vars(base) for base in kind.__mro__)  # functions are followed
        is_followed = issubclass(kind, _NATIVE) or calls
        is_pickled = not is_followed and package not in _NAMED and _pickles_itself(kind)
        return _pickled if is_pickled else None
    members = (member for base in kind.__mro__ for member in vars(base).values())
    slots = tuple(m for m in members if isinstance(m, MemberDescriptorType))
    slots = tuple(slot for slot in slots if not slot.__name__.startswith("__"))
    return functools.partial(_slots, slots) if slots else None


def _is_buffer(value: Any) -> bool:
    """Whether a value gives its bytes; before Python 3.12 only an attempt tells."""
    try:
        return memoryview(value).format != "O"
    except (TypeError, ValueError, BufferError):
        return False


def _bytes(value: Any) -> Items:
    try:
        return [(bytes, memoryview(value).tobytes())]
    except (TypeError, ValueError):  # released since
        return []


def _slots(slots: tuple[MemberDescriptorType, ...], value: Any) -> Items:
    values: Items = []
    for slot in slots:
        try:
            values.append((slot, slot.__get__(value, type(value))))
        except AttributeError:
            values.append((slot, UNSET))
    return values


def _pickles_itself(kind: type) -> bool:
    """Whether a type says how its objects are pickled."""
    names = "__reduce__", "__reduce_ex__"
    says = any(getattr(kind, name) is not getattr(object, name) for name in names)
    return says or kind in copyreg.dispatch_table


def _pickled(value: Any) -> Items:
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduction = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:  # locks, files and others that no process can hand on
        return []
    if isinstance(reduction, str):
        return []
    function, arguments, *more = reduction
    state, *contents = (*more, None, None, None)[:3]
    return [(Pickled, Pickled((function, arguments, state, *(map(_listed, contents)))))]


def _listed(iterator: Any) -> Any:
    return None if iterator is None else tuple(iterator)


def _position(frame: FrameType | None) -> Items:
    """The position of a generator; an exhausted one has no frame."""
    return [] if frame is None else [("instruction", frame.f_lasti), *frame.f_locals.items()]


_READERS: dict[type, Reader] = {
    ContextVar: lambda variable: [(variable, variable.get(UNSET))],
    MappingProxyType: lambda proxy: list(proxy.items()),
    functools.partial: lambda p: [("func", p.func), ("args", p.args), ("keywords", p.keywords)],
    GeneratorType: lambda generator: _position(generator.gi_frame),
    MethodType: lambda method: [("self", method.__self__), ("function", method.__func__)],
}
