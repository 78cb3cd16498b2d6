"""Snapshots and fingerprints of the Python values reachable from a model's attributes."""

from __future__ import annotations

import enum
import hashlib
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.capture.state.hidden_parts import HiddenParts, Pickled, hidden_parts

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

_OPAQUE = (type, torch.Tensor, nn.Module, types.ModuleType, types.FunctionType,
           types.MethodType, types.BuiltinFunctionType, *PLAIN)  # fmt: skip
_LIBRARIES = {"torch", "numpy", "autopar", "builtins", "functools", "threading", "logging"}


_OF_MEMBERS = {"_value_", "_name_", "__objclass__", "_sort_order_"}
"""Attributes of every member of an enum."""


class Missing:
    """The value of an absent attribute."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()

Attribute = tuple[str, str]
"""A module name and an attribute name."""

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any] | HiddenParts


def attribute_of(name: str) -> Attribute:
    """The module and attribute of a parameter or buffer by its full name."""
    module, _, key = name.rpartition(".")
    return module, key


def contents(value: Any) -> Container | None:
    """The container to search: `value` itself, or the attribute dict of a user's object."""
    if isinstance(value, (dict, list, set, deque)):
        return value
    return _attributes(value)


def _attributes(value: Any) -> dict[str, Any] | None:
    """The attribute dict of a user's object, None where nothing in it can change."""
    if isinstance(value, _OPAQUE) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return None
    attributes: dict[str, Any] | None = getattr(value, "__dict__", None)
    if isinstance(value, enum.Enum) and isinstance(value.value, PLAIN):
        return attributes if attributes and attributes.keys() - _OF_MEMBERS else None
    return attributes


def containers(value: Any) -> list[Container]:
    """All that may change in a value: its items, its attributes and its hidden parts.

    Those of a weak reference are its target's: whoever held the reference would keep torch from
    swapping a tensor.
    """
    value = referent(value)
    if isinstance(value, (*PLAIN, tuple)):
        return []
    parts: list[Container | None] = [contents(value), hidden_parts(value)]
    if isinstance(value, (dict, list, set, deque)) and type(value).__dictoffset__:
        parts.append(_attributes(value))
    return [container for container in parts if container is not None]


def items(container: Container) -> list[tuple[Any, Any]]:
    """Keys and values of a dict, indices and values of a sequence; nothing for a set.

    Values are those that a dict holds, even if its class makes others of them on access.
    """
    if isinstance(container, HiddenParts):
        return container.items()
    if isinstance(container, OrderedDict):
        return [
            (key, OrderedDict.__getitem__(container, key)) for key in OrderedDict.keys(container)
        ]
    if isinstance(container, dict):
        return list(dict.items(container))
    return [] if isinstance(container, set) else list(enumerate(container))


def copy_of(container: Container) -> Any:
    """A shallow copy: a dict, a set, a list for a sequence, items for hidden parts."""
    if isinstance(container, HiddenParts):
        return [(key, _frozen(part)) for key, part in container.items()]
    if isinstance(container, dict):
        return dict(items(container))
    return set(container) if isinstance(container, set) else list(container)


def _frozen(part: Any) -> Any:
    """A hidden part as it is now; what an object gives to pickle may share its state."""
    return Pickled([Fingerprinter()(part)]) if isinstance(part, Pickled) else part


def referent(value: Any) -> Any:
    """The target of a weak reference, None once it is collected; any other value itself."""
    return value() if isinstance(value, weakref.ref) else value


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same object, or equal plain values of one type."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Pickled):
        return tuple(one) == tuple(other)
    if isinstance(one, tuple) and len(one) == len(other):
        return all(map(equal, one, other))
    return isinstance(one, PLAIN) and bool(one == other)


def same_items(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    """Whether two lists of items have the same keys and equal values."""
    return len(one) == len(other) and all(
        key == its and equal(part, old) for (key, part), (its, old) in zip(one, other, strict=True)
    )


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
        name = f"self.{self.text}"
        return f"{name} of {self.module}" if self.module else name

    @property
    def text(self) -> str:
        """The keys as Python writes them; parts without a name are their owner's."""
        first, *others = (key for key in self.keys if not isinstance(key, type))
        names = (getattr(key, "__name__", key) for key in others)
        return str(first) + "".join(f"[{name}]" for name in names)


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
    for container in containers(value):
        number = identity(container)
        if number in found or len(found) >= limit or depth == 0:
            continue
        found[number] = container, path
        for key, part in items(container):
            if not isinstance(part, Pickled):
                find_containers(part, path.child(key), found, limit, depth - 1)


def leaves(values: tuple[Any, ...]) -> Iterator[Any]:
    """Values of tuples within tuples."""
    for value in values:
        if isinstance(value, tuple):
            yield from leaves(value)
        else:
            yield value


def identity(container: Container) -> int:
    """A number of a container; that of hidden parts is their owner's, negated."""
    return -id(container.value) if isinstance(container, HiddenParts) else id(container)


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
        _, copy, _ = self._copies.get(identity(container), (None, None, None))
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
            if isinstance(container, HiddenParts):
                container.restore(copy)
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
    if isinstance(now, HiddenParts):
        old, new = dict(before), dict(copy_of(now))
    else:
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
        self._kept_alive: list[Container] = []  # some are made at each read, so ids would recur

    def __call__(self, value: Any, depth: int = MAX_DEPTH) -> Any:
        value = referent(value)
        if isinstance(value, float):
            # A NaN would differ from itself at every call, and -0.0 would pass for 0.0.
            return float, value.hex()
        if isinstance(value, bytes) and len(value) > MAX_BYTES:
            return bytes, len(value), hashlib.blake2b(value).digest()
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, tuple):
            return (type(value), *(self(part, depth) for part in value))
        parts = [x for x in containers(value) if x is value or isinstance(x, HiddenParts) or x]
        if not parts:
            return ByIdentity(value)
        return type(value), *(self._of_container(container, value, depth) for container in parts)

    def _of_container(self, container: Container, value: Any, depth: int) -> Any:
        if (number := self._seen.get(identity(container))) is not None:
            return "container", number
        if depth == 0 or len(self._seen) == MAX_COMPARED:
            return ByIdentity(value)
        self._seen[identity(container)] = len(self._seen)
        self._kept_alive.append(container)
        if isinstance(container, set):
            return frozenset(self(part, depth - 1) for part in container)
        return tuple((_key(key), self(part, depth - 1)) for key, part in items(container))


def _key(key: Any) -> Any:
    return key if isinstance(key, PLAIN) else ByIdentity(key)


MAX_BYTES = 64
"""Bytes that a fingerprint holds as they are; more are hashed."""


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
