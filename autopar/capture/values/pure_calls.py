"""`run_purely`: runs functions whose results depend on the values of their arguments alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar._torch import TorchDispatchMode, pytree, without_modes

aten = torch.ops.aten
_UNINITIALIZED = frozenset(
    {
        *(aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted),
        *(aten.new_empty, aten.new_empty_strided, aten.resize_, aten.resize_as_),
    }
)


class Impure(Exception):
    """An operator would draw random numbers or leave memory uninitialized."""


class _OnlyPure(TorchDispatchMode):
    """Raises Impure in place of an operator whose result its arguments do not determine."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket in _UNINITIALIZED:
            raise Impure
        return func(*args, **(kwargs or {}))


def run_purely(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result of a function of real tensors, outside of any trace.

    Raises:
        Impure: the result depends on random numbers or uninitialized memory; none was drawn.
    """
    with without_modes(), torch.no_grad(), _OnlyPure():
        return func(*args, **kwargs)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors among the leaves of a tree."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
