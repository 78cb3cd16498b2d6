"""Optimizers of loops: made before the model is compiled, or restored before it has a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.runtime.module import DistributedModule


def follow_parameters(
    optimizers: Iterable[Any], before: Mapping[str, nn.Parameter], model: nn.Module
) -> None:
    """Gives optimizers the parameters that replaced those `before` of the same names."""
    now = dict(model.named_parameters())
    moved = {parameter: now.get(name, parameter) for name, parameter in before.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [moved.get(p, p) for p in group["params"]]


def load_optimizer_state(
    model: DistributedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Loads a whole state, after the next call if the model has no plan yet.

    All ranks call this at once.
    """
    if model.is_planned:
        model.load_full_optimizer_state_dict(optimizer, state)
    else:
        _LoadLater(model, optimizer, state)


class _LoadLater:
    """A forward hook that loads the state of an optimizer, once."""

    def __init__(
        self, model: DistributedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        self._optimizer, self._state = optimizer, state
        self._hook = model.register_forward_hook(self)

    def __call__(self, model: DistributedModule, args: Any, result: Any) -> None:
        self._hook.remove()
        model.load_full_optimizer_state_dict(self._optimizer, self._state)
