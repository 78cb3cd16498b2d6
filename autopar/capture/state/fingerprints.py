"""Fingerprints of Python values: equal exactly where programs captured for them are the same."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.capture.state.contents import HOOKS, MISSING, PLAIN, contents, items, referent

DEPTH, MOST = 6, 500
"""Levels below an attribute, and containers, that are compared."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Equal to what holds the same object, which it keeps alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fingerprint) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Freezer:
    """Makes hashable values of a model's attributes.

    Equal contents give equal values. Objects that cannot be looked into are equal to themselves,
    and weak references to those that point to the same object: torch cannot swap the contents of
    a tensor while a weak reference to it is kept.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def __call__(self, value: Any, depth: int = DEPTH) -> Any:
        if isinstance(value, float):
            return float, value.hex()
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, tuple):
            return (type(value), *(self(part, depth) for part in value))
        container = contents(value)
        if container is None or (not container and container is not value):
            return Fingerprint(referent(value))
        if (number := self._seen.get(id(container))) is not None:
            return "container", number
        if depth == 0 or len(self._seen) == MOST:
            return Fingerprint(value)
        self._seen[id(container)] = len(self._seen)
        if isinstance(container, set):
            return type(value), frozenset(self(part, depth - 1) for part in container)
        pairs = ((_key(key), self(part, depth - 1)) for key, part in items(container))
        return type(value), *pairs


def _key(key: Any) -> Any:
    return key if isinstance(key, PLAIN) else Fingerprint(key)


def type_of(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def structure_of(name: str, module: nn.Module) -> Any:
    """The structure of a module: its type, children, parameters, buffers and hooks."""
    hooks = tuple(Fingerprint(hook) for table in HOOKS for hook in getattr(module, table).values())
    buffers = tuple((key, type_of(buffer)) for key, buffer in module._buffers.items())
    return name, type(module), tuple(module._modules), tuple(module._parameters), buffers, hooks


def member_of(kind: type, key: str) -> tuple[MappingProxyType[str, Any], Any]:
    """The class that has an attribute, as its dict, and the attribute; its own dict for none."""
    for base in kind.__mro__:
        if key in vars(base):
            return vars(base), vars(base)[key]
    return vars(kind), MISSING
