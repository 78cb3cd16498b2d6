"""`LinkedResult`: a result of a call from which another result of it was computed.

    h, z = model(x)  # z is head(h)

On one device the gradient of a loss of `z` flows through `h`. A program computes both at once, so
autograd sees no way from `z` to `h`: hooks of `h` would see, and change, the direct part alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._torch import pytree, without_subclasses
from autopar.capture.trace import Capture
from autopar.core.common.containers import flatten
from autopar.errors import StrategyError

_HOOKS = (Tensor.register_hook, Tensor.retain_grad)
_INPUTS = {torch.autograd.grad: 1, torch.autograd.backward: 4, Tensor.backward: 4}
"""Functions that compute gradients, with the position of the tensors they are by."""


def check_link(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Checks that a function asks for no gradient that flows through a linked result.

    Raises:
        StrategyError: it does.
    """
    if func in _HOOKS:
        asks = _is_linked(args[0])
    elif (position := _INPUTS.get(func)) is not None:
        inputs = args[position] if len(args) > position else kwargs.get("inputs")
        asks = any(map(_is_linked, pytree.tree_leaves(inputs)))
    else:
        return
    if asks:
        raise StrategyError(
            f"{func.__name__} asks for the gradient of a result that another result of the same "
            "call was computed from. A compiled model computes both at once, so it lacks the part "
            "that flows through the other. Compute the other result from it in the loop, register "
            "a hook inside forward, or return one of them."
        )


def _is_linked(value: Any) -> bool:
    return isinstance(value, Tensor) and getattr(value, "linked_by_autopar", False)


class LinkedResult(Tensor):
    """A plain tensor otherwise; operators on it return plain ones."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclasses():
            check_link(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))


def with_links(result: Any, captured: Capture | None) -> Any:
    """The result of a call, whose linked tensors refuse to be differentiated by."""
    if captured is None or not any(captured.linked) or not torch.is_grad_enabled():
        return result
    leaves, structure = flatten(result)
    for leaf, is_inner in zip(leaves, captured.linked, strict=False):
        if is_inner and isinstance(leaf, Tensor) and leaf.requires_grad:
            if type(leaf) is Tensor:  # rows that are gathered later check their links themselves
                leaf.__class__ = LinkedResult
            leaf.linked_by_autopar = True  # type: ignore[attr-defined]
    return pytree.tree_unflatten(leaves, structure)
