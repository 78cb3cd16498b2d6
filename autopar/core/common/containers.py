"""`flatten`: flattens arguments and results, also in containers that torch's pytree lacks.

`flatten` unpacks a dataclass, `SimpleNamespace` or `UserDict` that holds a tensor.
`pytree.tree_unflatten` rebuilds it. `Unreturned` stands for an object that it cannot unpack.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from autopar._torch import pytree
from autopar.errors import BatchError, ModelError

_PLAIN = (torch.Tensor, nn.Module, int, float, str, bytes, type(None), torch.dtype, torch.device)
_MAX_DEPTH = 4  # nested containers


class _Unpacked:
    """An unpacked object: its class, and its attributes by name."""

    def __init__(self, kind: type, attributes: Mapping[str, Any]) -> None:
        self.kind, self.attributes = kind, attributes


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, and the structure for `pytree.tree_unflatten`."""
    leaves, structure = pytree.tree_flatten(tree)
    if any(map(_can_be_unpacked, leaves)):
        return pytree.tree_flatten(_unpacked(tree))
    return leaves, structure


def hidden_tensors(leaf: Any) -> list[torch.Tensor]:
    """Tensors in attributes of an object that `flatten` does not unpack."""
    return list(_tensors(_attributes(leaf)))


def check_no_hidden_tensors(leaves: Sequence[Any]) -> None:
    """Raises BatchError if an argument hides tensors that may run over the batch."""
    given = [x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim()]
    for leaf in leaves:
        hidden = [t.shape[0] for t in hidden_tensors(leaf) if t.dim()]
        if hidden and (not given or given[0] in hidden):
            raise BatchError(
                f"an argument of the model is a {type(leaf).__qualname__}, whose tensors autopar "
                "cannot see to take this rank's rows: give tensors, or a tuple, list, dict, "
                "dataclass or SimpleNamespace of them."
            )


def _unpacked(tree: Any) -> Any:
    def opened(leaf: Any) -> Any:
        if not _can_be_unpacked(leaf):
            return leaf
        return _Unpacked(type(leaf), _unpacked(_attributes(leaf)))

    return pytree.tree_map(opened, tree)


def _can_be_unpacked(leaf: Any) -> bool:
    if isinstance(leaf, (*_PLAIN, type)):
        return False
    known = dataclasses.is_dataclass(leaf) or isinstance(leaf, (SimpleNamespace, UserDict))
    return known and any(True for _ in _tensors(_attributes(leaf)))


def _attributes(leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, (*_PLAIN, type)):
        return {}
    if dataclasses.is_dataclass(leaf):
        return {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
    return dict(getattr(leaf, "__dict__", {}))


def _tensors(tree: Any, depth: int = _MAX_DEPTH) -> Iterator[torch.Tensor]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif depth and (attributes := _attributes(leaf)):
            yield from _tensors(attributes, depth - 1)


def _flatten(opened: _Unpacked) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(opened.attributes.values()), (opened.kind, tuple(opened.attributes))


def _rebuild(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    """An object of the class with these attributes, frozen dataclasses included."""
    kind, names = context
    made: Any = kind.__new__(kind)  # type: ignore[call-overload]
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Unpacked, _flatten, _rebuild)


class Unreturned:
    """Stands for an object in the result of a model; every use of it is an error.

    Models of transformers return a cache of keys and values beside their loss, which training does
    not read. Such an object is no reason to refuse the model.

    Args:
        model: name of the model's class.
        kind: name of the object's class.
    """

    def __init__(self, model: str, kind: str) -> None:
        self._names = model, kind

    def __repr__(self) -> str:
        return f"<{self._names[1]} of {self._names[0]}, not returned>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_names":
            raise AttributeError(name)  # copying and pickling ask for methods that may be absent
        self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        model, kind = self._names
        raise ModelError(
            f"{model} returned a {kind}, whose tensors autopar does not return: it returns those "
            "in tuples, lists, dicts, dataclasses and SimpleNamespaces. Return the tensors that "
            "you read, or call the model inside model.gathered()."
        )

    __len__ = __iter__ = __getitem__ = __contains__ = __call__ = _refuse
