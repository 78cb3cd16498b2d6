"""Snapshots and fingerprints of the Python values reachable from a model's attributes."""

from __future__ import annotations

import enum
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that torch keeps in every module: tables, hooks and the training flag."""

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MAX_DEPTH = 6
"""Levels of containers followed below an attribute."""

MAX_CONTAINERS = 20_000
"""Containers copied for one model."""

MAX_COMPARED = 500
"""Containers compared below one attribute."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""Types compared by value."""

_OPAQUE = (type, enum.Enum, torch.Tensor, nn.Module, types.ModuleType, types.FunctionType,
           types.MethodType, types.BuiltinFunctionType, *PLAIN)  # fmt: skip
_LIBRARIES = {"torch", "numpy", "autopar", "builtins", "functools", "threading", "logging"}


class Missing:
    """The value of an absent attribute."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()

Attribute = tuple[str, str]
"""A module name and an attribute name."""

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


def attribute_of(name: str) -> Attribute:
    """The module and attribute of a parameter or buffer by its full name."""
    module, _, key = name.rpartition(".")
    return module, key


def contents(value: Any) -> Container | None:
    """The container to search: `value` itself, or the attribute dict of a user's object."""
    if isinstance(value, (dict, list, set, deque)):
        return value
    if isinstance(value, _OPAQUE) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    return getattr(value, "__dict__", None)


def items(container: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Keys and values of a dict, indices and values of a sequence; nothing for a set.

    Values are those that a dict holds, even if its class makes others of them on access.
    """
    if isinstance(container, OrderedDict):
        return [
            (key, OrderedDict.__getitem__(container, key)) for key in OrderedDict.keys(container)
        ]
    if isinstance(container, dict):
        return list(dict.items(container))
    return [] if isinstance(container, set) else list(enumerate(container))


def copy_of(container: Iterable[Any]) -> Any:
    """A shallow copy: a dict, a set, or a list for any other sequence."""
    if isinstance(container, dict):
        return dict(items(container))
    return set(container) if isinstance(container, set) else list(container)


def referent(value: Any) -> Any:
    """The target of a weak reference, None once it is collected; any other value itself."""
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
class ValuePath:
    """Location of a Python value: a module, its attribute, and the key at each level below."""

    module: str
    keys: tuple[Any, ...] = ()

    @property
    def attribute(self) -> Attribute:
        """The module and attribute that hold the value."""
        return self.module, self.keys[0]

    def child(self, key: Any) -> ValuePath:
        return replace(self, keys=(*self.keys, key))

    def __str__(self) -> str:
        first, *rest = (str(key) for key in self.keys)
        name = f"self.{first}" + "".join(f"[{key}]" for key in rest)
        return f"{name} of {self.module}" if self.module else name


@dataclass(frozen=True)
class Change:
    """A value that a call of the model replaced, added or deleted."""

    path: ValuePath
    container: Container
    key: Any
    old: Any
    new: Any


Found = dict[int, tuple[Container, ValuePath]]
"""Containers with their paths, by id."""


def find_containers(
    value: Any, path: ValuePath, found: Found, limit: int, depth: int = MAX_DEPTH
) -> None:
    """Adds every container reachable from a value to `found`, up to `limit` in all."""
    if isinstance(value, tuple):
        for index, part in enumerate(value):
            find_containers(part, path.child(index), found, limit, depth)
        return
    container = contents(value)
    if container is None or id(container) in found or len(found) >= limit or depth == 0:
        return
    found[id(container)] = container, path
    for key, part in items(container):
        find_containers(part, path.child(key), found, limit, depth - 1)


class Snapshot:
    """Copies of a model's Python containers, and of named variables, to compare and to restore.

    Snapshots include parameter, buffer and submodule tables, and no other internals of torch.
    """

    def __init__(self, model: nn.Module, variables: Iterable[tuple[str, Any]] = ()) -> None:
        found: Found = {}
        for name, module in model.named_modules():
            attributes, path = vars(module), ValuePath(name)
            if len(found) < MAX_CONTAINERS:
                found[id(attributes)] = attributes, path
            for key, value in attributes.items():
                if key not in INTERNAL or key in TABLES:
                    find_containers(value, path.child(key), found, MAX_CONTAINERS)
        for name, value in variables:
            find_containers(value, ValuePath("", (name,)), found, MAX_CONTAINERS)
        self._copies = {key: (now, copy_of(now), path) for key, (now, path) in found.items()}
        tables = (getattr(module, table) for module in model.modules() for table in HOOKS)
        self._hooks = [(table, len(table)) for table in tables]

    def copy_of(self, container: Any) -> Any:
        """The copy of a container, None for an unknown one."""
        _, copy, _ = self._copies.get(id(container), (None, None, None))
        return copy

    def changes(self) -> list[Change]:
        return [change for entry in self._copies.values() for change in _changes(*entry)]

    def has_new_hooks(self) -> bool:
        """Whether hooks were added to modules."""
        return any(len(table) > count for table, count in self._hooks)

    def restore(self) -> None:
        """Undoes all changes, except for hooks and plain attributes added with them.

        A model that adds hooks in its first call notes in an attribute that it did.
        """
        set_up = self.has_new_hooks()
        for container, copy, path in self._copies.values():
            if not any(_changes(container, copy, path)):
                continue
            before = copy
            if set_up and not path.keys and isinstance(container, dict):
                new = {key: value for key, value in container.items() if key not in copy}
                before = copy | {k: v for k, v in new.items() if isinstance(v, PLAIN)}
            container.clear()
            if isinstance(container, (dict, set)):
                container.update(before)
            else:
                container.extend(before)


def _changes(now: Container, before: Any, path: ValuePath) -> Iterator[Change]:
    if isinstance(now, set):
        if now != before:
            yield Change(path, now, None, before, set(now))
        return
    old, new = dict(items(before)), dict(items(now))
    for key in dict.fromkeys([*old, *new]):
        if not path.keys and key in INTERNAL and key != "training":
            continue
        one, other = old.get(key, MISSING), new.get(key, MISSING)
        if not equal(one, other):
            yield Change(path.child(key), now, key, one, other)


@dataclass(frozen=True, eq=False)
class ByIdentity:
    """A hashable wrapper that compares an object by identity and keeps it alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Fingerprinter:
    """Makes hashable fingerprints of a model's attributes.

    Values with equal fingerprints give the same captured program. Opaque objects compare by
    identity, weak references by their targets. Fingerprints hold no weak reference, since torch
    cannot swap a tensor that has one.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def __call__(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        if isinstance(value, float):
            return float, value.hex()
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, tuple):
            return (type(value), *(self(part, depth) for part in value))
        container = contents(value)
        if container is None or (not container and container is not value):
            return ByIdentity(referent(value))
        if (number := self._seen.get(id(container))) is not None:
            return "container", number
        if depth == 0 or len(self._seen) == MAX_COMPARED:
            return ByIdentity(value)
        self._seen[id(container)] = len(self._seen)
        if isinstance(container, set):
            return type(value), frozenset(self(part, depth - 1) for part in container)
        pairs = ((_key(key), self(part, depth - 1)) for key, part in items(container))
        return type(value), *pairs


def _key(key: Any) -> Any:
    return key if isinstance(key, PLAIN) else ByIdentity(key)


def tensor_type(tensor: torch.Tensor | None) -> Any:
    """Shape, dtype and device of a tensor."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def same_type(one: Any, other: Any) -> bool:
    """Whether two values are tensors of one shape and dtype on one device."""
    are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return are_tensors and bool(tensor_type(one) == tensor_type(other))


def structure_of(name: str, module: nn.Module) -> Any:
    """The structure of a module: its type, children, parameters, buffers and hooks."""
    hooks = tuple(ByIdentity(hook) for table in HOOKS for hook in getattr(module, table).values())
    buffers = tuple((key, tensor_type(buffer)) for key, buffer in module._buffers.items())
    return name, type(module), tuple(module._modules), tuple(module._parameters), buffers, hooks


def member_of(kind: type, key: str) -> tuple[MappingProxyType[str, Any], Any]:
    """The dict of the class that defines an attribute, and the attribute; else MISSING."""
    for base in kind.__mro__:
        if key in vars(base):
            return vars(base), vars(base)[key]
    return vars(kind), MISSING
