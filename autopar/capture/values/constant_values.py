"""`ConstantValues`: values of integer tensors that forward makes from numbers alone.

They are the same in every call, so Python may read them, as in the plain model. The trace computes
each beside its traced tensor. It notes how, since a value that was read may depend on sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar._torch import hint_of, pytree, without_modes
from autopar.capture.symbolic_sizes import evaluated
from autopar.capture.values.known_values import is_random, writes

MOST_ELEMENTS = 2**20
"""Elements of the largest tensor whose values are kept: 8 MiB of int64."""

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
            known[self] = result if self.index is None else _tensors(result)[self.index]
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
        if func not in _READS or not self._all_known(_tensors((args, kwargs))):
            return None
        value = self._run(func, args, kwargs)
        self.readings.append(Reading(self._recipe(func, args, kwargs), value))
        return (value,)

    def follow(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> None:
        """Computes the values of a traced result, if it is a constant."""
        given = _tensors((args, kwargs))
        if given and not self._constants:
            return
        if writes(func) or kwargs.get("out") is not None or func in _SHAPES_OF_ANOTHER:
            self._forget(given)
        elif self._all_known(given) if given else func in _FACTORIES:
            made = _tensors(result)
            if made and all(_is_small_integer(x) for x in made):
                self._add(func, args, kwargs, made)

    def _add(self, func: Callable[..., Any], args: Any, kwargs: Any, made: list[Tensor]) -> None:
        if "empty" in getattr(func, "__name__", ""):
            return
        try:
            with without_modes(), is_random() as random:
                values = _tensors(self._run(func, args, kwargs))
        except Exception:  # a device that is not here, for one
            return
        if random():
            return
        recipe = self._recipe(func, args, kwargs)
        for index, (traced, value) in enumerate(zip(made, values, strict=True)):
            each = Recipe(recipe.func, recipe.args, recipe.kwargs, index)
            self._constants[id(traced)] = _Constant(traced, value, each)

    def _all_known(self, given: list[Tensor]) -> bool:
        return bool(given) and all(id(tensor) in self._constants for tensor in given)

    def _forget(self, given: list[Tensor]) -> None:
        """Forgets constants that a function may have changed, with their views."""
        found = [self._constants[id(tensor)] for tensor in given if id(tensor) in self._constants]
        changed = {constant.value.untyped_storage().data_ptr() for constant in found}
        for key, constant in list(self._constants.items()):
            if constant.value.untyped_storage().data_ptr() in changed:
                del self._constants[key]

    def _run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        def concrete(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self._constants[id(leaf)].value
            return hint_of(leaf) if isinstance(leaf, torch.SymInt) else _on_cpu(leaf)

        with without_modes(), torch.no_grad():
            args, kwargs = pytree.tree_map(concrete, (args, dict(kwargs)))
            return func(*args, **kwargs)

    def _recipe(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Recipe:
        def described(leaf: Any) -> Any:
            return self._constants[id(leaf)].recipe if isinstance(leaf, Tensor) else _on_cpu(leaf)

        args, kwargs = pytree.tree_map(described, (args, dict(kwargs)))
        return Recipe(func, args, kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _on_cpu(leaf: Any) -> Any:
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _is_small_integer(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return False
    elements = 1
    for size in tensor.shape:
        elements *= hint_of(size)
    return elements <= MOST_ELEMENTS
