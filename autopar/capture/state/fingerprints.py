"""Fingerprints of Python values: equal exactly if the values give the same captured program."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.capture.state.contents import (
    HOOKS,
    MAX_DEPTH,
    MISSING,
    PLAIN,
    contents,
    items,
    referent,
)

MAX_CONTAINERS = 500
"""Containers compared below one attribute."""


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

    Equal contents give equal fingerprints. Opaque objects compare by identity. Weak references
    compare by their targets. Fingerprints hold no weak reference, since torch cannot swap a tensor
    that has one.
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
        if depth == 0 or len(self._seen) == MAX_CONTAINERS:
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
