"""`ConstantValues`: values of tensors of whole numbers that forward makes from numbers alone.

They are the same in every call, so Python may read them, as in the plain model. The trace computes
each beside its traced tensor. It notes how, since a value that was read may depend on sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar._torch import hint_of, pytree
from autopar.capture.symbolic_sizes import evaluated
from autopar.capture.values.pure_calls import run_purely, tensors_in

MOST_ELEMENTS = 2**20
"""Elements of the largest tensor whose values are kept: 8 MiB of int64."""

MOST_WHOLE = 256
"""Up to here bfloat16 holds every integer, so that no device rounds one."""

_FACTORIES = frozenset(
    {torch.tensor, torch.as_tensor, torch.arange, torch.zeros, torch.ones, torch.full}
)
_READS = frozenset(
    {
        *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__),
        *(Tensor.__contains__, Tensor.item, Tensor.tolist, Tensor.equal),
        *(torch.equal, torch.is_nonzero),
    }
)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SHAPES_OF_ANOTHER = frozenset({Tensor.view_as, Tensor.reshape_as, Tensor.expand_as})


@dataclass(frozen=True, eq=False)
class Recipe:
    """A function and its arguments: tensors are recipes, and sizes may be symbols.

    Attributes:
        index: which tensor of the function's result; None for the whole result.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None = None

    def made(self, binding: Mapping[Any, int], known: dict[Recipe, Any]) -> Any:
        """The result with sizes for symbols; `known` holds the results so far."""

        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, Recipe):
                return leaf.made(binding, known)
            if isinstance(leaf, torch.SymInt):
                return evaluated([leaf.node.expr], binding)[0]
            return leaf

        if self not in known:
            args, kwargs = pytree.tree_map(concrete, (self.args, dict(self.kwargs)))
            result = self.func(*args, **kwargs)
            known[self] = result if self.index is None else tensors_in(result)[self.index]
        return known[self]


@dataclass(frozen=True, eq=False)
class Reading:
    """A value that Python read, and its recipe."""

    recipe: Recipe
    value: Any

    def holds(self, binding: Mapping[Any, int], known: dict[Recipe, Any]) -> bool:
        """Whether Python reads the same at other sizes; `known` as in `Recipe.made`."""
        return bool(self.recipe.made(binding, known) == self.value)


@dataclass(frozen=True, eq=False)
class _Constant:
    traced: Tensor  # keeps its id from being used again
    version: int
    value: Tensor
    recipe: Recipe


class ConstantValues:
    """Constants of a trace, found by their traced tensors.

    Attributes:
        readings: values that Python read so far.
    """

    def __init__(self) -> None:
        self._constants: dict[int, _Constant] = {}
        self.readings: list[Reading] = []

    def read(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """The value that a function reads from constants alone, in a tuple; else None."""
        if func not in _READS or not self._all_known(tensors_in((args, kwargs))):
            return None
        value = self._run(func, args, kwargs)
        self.readings.append(Reading(self._recipe(func, args, kwargs), value))
        return (value,)

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        result: Any,
    ) -> None:
        """Computes the values of the traced result of a function of `given` tensors."""
        if func is _SET_DATA:  # changes no version
            self._constants.pop(id(args[0]), None)
        known = self._all_known(given) if given else func in _FACTORIES
        made = tensors_in(result) if known and func not in _SHAPES_OF_ANOTHER else []
        if made and all(map(_is_small, made)):
            self._add(func, args, kwargs, made)

    def _add(self, func: Callable[..., Any], args: Any, kwargs: Any, made: list[Tensor]) -> None:
        given = [self._constants[id(tensor)].value for tensor in tensors_in((args, kwargs))]
        try:
            values = tensors_in(self._run(func, args, kwargs))
        except Exception:  # an impure function, or a device that is not here
            return
        for value in values:
            if any(_writes_unseen(value, other) for other in given):
                return self._forget(value)
        if not run_purely(_are_whole, (values,), {}):
            return
        recipe = self._recipe(func, args, kwargs)
        for index, (traced, value) in enumerate(zip(made, values, strict=True)):
            each = Recipe(recipe.func, recipe.args, recipe.kwargs, index)
            self._constants[id(traced)] = _Constant(traced, traced._version, value, each)

    def _forget(self, value: Tensor) -> None:
        """Forgets the constants in the memory of a value."""
        place = value.untyped_storage().data_ptr()
        for key, constant in list(self._constants.items()):
            if constant.value.untyped_storage().data_ptr() == place:
                del self._constants[key]

    def _all_known(self, given: Sequence[Tensor]) -> bool:
        """Whether all tensors are constants that nothing has written since."""
        found = [self._constants.get(id(tensor)) for tensor in given]
        return bool(found) and all(x is not None and x.version == x.traced._version for x in found)

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._constants[id(leaf)].value
            return hint_of(leaf) if isinstance(leaf, torch.SymInt) else _on_cpu(leaf)

        args, kwargs = pytree.tree_map(concrete, (args, dict(kwargs)))
        return run_purely(func, args, kwargs)

    def _recipe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Recipe:
        def described(leaf: Any) -> Any:
            return self._constants[id(leaf)].recipe if isinstance(leaf, Tensor) else _on_cpu(leaf)

        args, kwargs = pytree.tree_map(described, (args, dict(kwargs)))
        return Recipe(func, args, kwargs)


def _writes_unseen(value: Tensor, other: Tensor) -> bool:
    """Whether writing one tensor changes another whose version does not tell."""
    if value.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    before = other._version
    torch.autograd.graph.increment_version(value)
    return other._version == before


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _are_whole(values: Sequence[Tensor]) -> bool:
    """Whether every device computes the same: integers, and floats that are small integers."""
    floats = [value for value in values if value.is_floating_point()]
    return all(bool(((x == x.round()) & (x.abs() <= MOST_WHOLE)).all()) for x in floats)


def _is_small(tensor: Tensor) -> bool:
    if tensor.is_complex():
        return False
    elements = 1
    for size in tensor.shape:
        elements *= hint_of(size)
    return elements <= MOST_ELEMENTS
