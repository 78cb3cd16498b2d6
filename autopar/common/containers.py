"""Arguments and results as flat lists, also of containers that torch's pytree does not know.

A dataclass, a `SimpleNamespace` or a `UserDict` is taken apart where it holds a tensor, and put
together again when the list is unflattened.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.errors import BatchError

_PLAIN = (torch.Tensor, nn.Module, int, float, str, bytes, type(None), torch.dtype, torch.device)
_DEPTH = 4  # of containers inside containers


class _Opened:
    """An object taken apart: its class, and its attributes by name."""

    def __init__(self, kind: type, attributes: Mapping[str, Any]) -> None:
        self.kind, self.attributes = kind, attributes


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree and its structure, by which `pytree.tree_unflatten` makes it again."""
    leaves, structure = pytree.tree_flatten(tree)
    if any(map(_can_be_opened, leaves)):
        return pytree.tree_flatten(_opened(tree))
    return leaves, structure


def hidden_tensors(leaf: Any) -> list[torch.Tensor]:
    """The tensors that an object holds as attributes, where `flatten` does not find them."""
    return list(_tensors(_attributes(leaf)))


def check_no_hidden_tensors(leaves: Sequence[Any]) -> None:
    """Raises BatchError if an argument hides tensors that may be rows of the batch."""
    given = [x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
    for leaf in leaves:
        hidden = [t.shape[0] for t in hidden_tensors(leaf) if t.dim()]
        if hidden and (not given or given[0] in hidden):
            raise BatchError(
                f"an argument of the model is a {type(leaf).__qualname__}, whose tensors autopar "
                "cannot see to take this rank's rows: give tensors, or a tuple, list, dict, "
                "dataclass or SimpleNamespace of them."
            )


def _opened(tree: Any) -> Any:
    def opened(leaf: Any) -> Any:
        if not _can_be_opened(leaf):
            return leaf
        return _Opened(type(leaf), _opened(_attributes(leaf)))

    return pytree.tree_map(opened, tree)


def _can_be_opened(leaf: Any) -> bool:
    """Whether an object is of a kind that can be taken apart, and holds a tensor."""
    if isinstance(leaf, (*_PLAIN, type)):
        return False
    known = dataclasses.is_dataclass(leaf) or isinstance(leaf, (SimpleNamespace, UserDict))
    return known and any(True for _ in _tensors(_attributes(leaf)))


def _attributes(leaf: Any) -> dict[str, Any]:
    """The attributes of an object by name; none of what is no container."""
    if isinstance(leaf, (*_PLAIN, type)):
        return {}
    if dataclasses.is_dataclass(leaf):
        return {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
    return dict(getattr(leaf, "__dict__", {}))


def _tensors(tree: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and (attributes := _attributes(leaf)):
            yield from _tensors(attributes, depth - 1)


def _flatten(opened: _Opened) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(opened.attributes.values()), (opened.kind, tuple(opened.attributes))


def _put_together(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    """An object of the same class with these attributes, also of a frozen dataclass."""
    kind, names = context
    made: Any = kind.__new__(kind)  # type: ignore[call-overload]
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Opened, _flatten, _put_together)
