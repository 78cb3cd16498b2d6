"""`Snapshot`: shallow copies of the Python containers that a model's attributes lead to."""

from __future__ import annotations

import enum
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that torch itself keeps in every module: tables, hooks and the training flag."""

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
DEPTH, MOST = 6, 20_000
"""Levels below an attribute, and containers of one model, that are looked into."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Types whose equality is all there is to their values."""

_OPAQUE = (type, enum.Enum, torch.Tensor, nn.Module, types.ModuleType, types.FunctionType,
           types.MethodType, types.BuiltinFunctionType, *PLAIN)  # fmt: skip
_LIBRARIES = {"torch", "numpy", "autopar", "builtins", "functools", "threading", "logging"}


class Missing:
    """The value of an attribute that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
Steps = tuple[Any, ...]
"""An attribute of a module, then the key or attribute at each level below it."""


def contents(value: Any) -> Container | None:
    """The container to look into: `value` itself, or the attributes of an object of the user's."""
    if isinstance(value, (dict, list, set, deque)):
        return value
    if isinstance(value, _OPAQUE) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    return getattr(value, "__dict__", None)


def items(container: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The keys and values of a dict, the places and values of a sequence; a set is one value."""
    if isinstance(container, dict):
        return list(container.items())
    return [] if isinstance(container, set) else list(enumerate(container))


def referent(value: Any) -> Any:
    """The object that a weak reference points to, None once it is gone; any other value itself."""
    return value() if isinstance(value, weakref.ref) else value


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal plain values of one type."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple) and len(one) == len(other):
        return all(map(equal, one, other))
    return isinstance(one, PLAIN) and bool(one == other)


@dataclass(frozen=True)
class Place:
    """A Python value that a model holds.

    Attributes:
        module: name of the module.
        steps: the way from the module to the value.
    """

    module: str
    steps: Steps

    def __str__(self) -> str:
        first, *rest = (str(step) for step in self.steps)
        name = f"self.{first}" + "".join(f"[{step}]" for step in rest)
        return f"{name} of {self.module}" if self.module else name


@dataclass(frozen=True)
class Change:
    """A value that a call of the model replaced, added or took away."""

    place: Place
    container: Container
    key: Any
    old: Any
    new: Any


@dataclass
class _Kept:
    container: Container
    copy: Any
    place: Place


class Snapshot:
    """The contents of a model's Python containers, to be compared and restored.

    Parameters, buffers and submodules are compared as tables; what torch keeps beside them is not.
    """

    def __init__(self, model: nn.Module, others: Iterable[tuple[str, Any]] = ()) -> None:
        self._kept: dict[int, _Kept] = {}
        for name, module in model.named_modules():
            self._add(vars(module), Place(name, ()), 0)
        for name, value in others:
            if (container := contents(value)) is not None:
                self._add(container, Place("", (name,)), 1)

    def _add(self, container: Container, place: Place, depth: int) -> None:
        if id(container) in self._kept or len(self._kept) >= MOST or depth > DEPTH:
            return
        self._kept[id(container)] = _Kept(container, _copy(container), place)
        for key, value in items(container):
            if depth or key not in INTERNAL or key in TABLES:
                self._descend(value, Place(place.module, (*place.steps, key)), depth + 1)

    def _descend(self, value: Any, place: Place, depth: int) -> None:
        if isinstance(value, tuple):
            for index, part in enumerate(value):
                self._descend(part, Place(place.module, (*place.steps, index)), depth)
        elif (found := contents(value)) is not None:
            self._add(found, place, depth)

    def before(self, container: Any) -> Any:
        """The copy of a container, None for one that is not known."""
        kept = self._kept.get(id(container))
        return None if kept is None else kept.copy

    def changes(self) -> list[Change]:
        """The differences between the model's containers and their copies."""
        return [change for kept in self._kept.values() for change in _changes(kept)]

    def restore(self) -> None:
        """Gives every container its contents back."""
        for kept in self._kept.values():
            if not any(_changes(kept)):
                continue
            kept.container.clear()
            if isinstance(kept.container, (dict, set)):
                kept.container.update(kept.copy)
            else:
                kept.container.extend(kept.copy)


def _copy(container: Container) -> Any:
    for kind in (dict, set):
        if isinstance(container, kind):
            return kind(container)
    return list(container)


def _changes(kept: _Kept) -> Iterator[Change]:
    now, before, place = kept.container, kept.copy, kept.place
    if isinstance(now, set):
        if now != before:
            yield Change(place, now, None, before, set(now))
        return
    old, new = dict(items(before)), dict(items(now))
    for key in dict.fromkeys([*old, *new]):
        if not place.steps and key in INTERNAL and key != "training":
            continue
        one, other = old.get(key, MISSING), new.get(key, MISSING)
        if not equal(one, other):
            yield Change(Place(place.module, (*place.steps, key)), now, key, one, other)
