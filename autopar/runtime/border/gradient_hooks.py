"""Hooks that a loop registers on tensors: they see the gradients that one device would give them.

Autograd calls the hooks of all tensors that a function was given, with None where the gradient that
comes back reaches none of its outputs. On one device those hooks are not called.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from autopar._torch import HOOK_TABLES
from autopar.common.notices import warn_once
from autopar.errors import AutoparWarning


class _Present(NamedTuple):
    """A hook that is called with gradients alone."""

    hook: Any

    def __call__(self, gradient: torch.Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


def leave_out_hooks(
    tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> None:
    """Makes hooks of tensors without a gradient wait for one; both are in the same order."""
    for tensor, gradient in zip(tensors, gradients, strict=True):
        hooks: dict[int, Any] | None = tensor._backward_hooks
        if gradient is None and hooks:
            for number, hook in hooks.items():
                if not isinstance(hook, _Present):
                    hooks[number] = _Present(hook)


def reads_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether hooks see the gradient of a parameter after each backward.

    Gradients cannot be held back then, as `no_sync` does: a hook wants the value of all ranks.
    """
    hooked = any(getattr(p, table, None) for p in parameters for table in HOOK_TABLES)
    if hooked:
        warn_once(
            AutoparWarning,
            "parameters have gradient hooks, which see the gradient of all ranks: so gradients are "
            "reduced at every call, also inside of no_sync().",
        )
    return hooked
