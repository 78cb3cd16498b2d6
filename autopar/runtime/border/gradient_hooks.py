"""Hooks that a loop registers on tensors: they see the gradients that one device would give them.

Autograd calls the hooks of all tensors that a function was given, with None where the gradient that
comes back reaches none of its outputs. On one device those hooks are not called. There a hook is
called as soon as a gradient is complete, and here after all are: hooks that draw hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from autopar._torch import HOOK_TABLES
from autopar.core.common.notices import warn_once
from autopar.errors import AutoparWarning, NumericsWarning


class _Present(NamedTuple):
    """A hook that is called with gradients alone, of one tensor or in an order that may matter."""

    hook: Any
    has_order: bool

    def __call__(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        before = _random_states(tensor)
        result = self.hook(tensor)
        if self.has_order and not all(map(torch.equal, before, _random_states(tensor))):
            warn_once(
                NumericsWarning,
                "gradient hooks of several parameters draw random numbers. One device calls them "
                "in another order, so each draws other numbers there. Draw in the loop, between "
                "backward and step.",
            )
        return result


def leave_out_hooks(
    tensors: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]
) -> None:
    """Makes hooks of tensors without a gradient wait for one; both are in the same order."""
    pairs = zip(tensors, gradients, strict=True)
    hooked = [(tables, gradient) for t, gradient in pairs if (tables := hook_tables_of(t))]
    for tables, gradient in hooked:
        if gradient is None or len(hooked) > 1:
            for table in tables:
                for number, hook in table.items():
                    # A hook wrapped while it was alone does not watch the order: wrap it anew.
                    bare = hook.hook if isinstance(hook, _Present) else hook
                    table[number] = _Present(bare, len(hooked) > 1)


def hook_tables_of(tensor: torch.Tensor) -> list[dict[int, Any]]:
    """The tables with hooks of a tensor that see its gradient; none if it has no such hooks."""
    return [table for name in HOOK_TABLES if (table := getattr(tensor, name, None))]


def _random_states(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The states of the generators that a hook of a tensor may use."""
    on_gpu = [torch.cuda.get_rng_state(tensor.device)] if tensor.is_cuda else []
    return [torch.get_rng_state(), *on_gpu]


def reads_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether hooks see the gradient of a parameter after each backward.

    Gradients cannot be held back then, as `no_sync` does: a hook wants the value of all ranks.
    """
    hooked = any(map(hook_tables_of, parameters))
    if hooked:
        warn_once(
            AutoparWarning,
            "parameters have gradient hooks, which see the gradient of all ranks: so gradients are "
            "reduced at every call, also inside of no_sync().",
        )
    return hooked
