"""Optimizers of loops: made before the model is compiled, or restored before it has a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import StrategyError
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


Order = list[list[str]]
"""Names of the parameters of each group of an optimizer, in the order of one process."""


def order_of(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> Order:
    """The order of an optimizer before stages drop the parameters of others."""
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]


def numbered_state(
    model: DistributedModule, optimizer: torch.optim.Optimizer, order: Order
) -> dict[str, Any]:
    """The state dict of an optimizer on one process; all ranks call this at once."""
    named = model.full_optimizer_state_dict(optimizer)
    number = {name: i for i, name in enumerate(name for group in order for name in group)}
    groups = [group["params"] for group in named["param_groups"]]
    for name in (name for group in groups for name in group):
        number.setdefault(name, len(number))  # of a group that was added later
    return {
        "state": {number.get(name, name): state for name, state in named["state"].items()},
        "param_groups": [
            {**group, "params": sorted(number[name] for name in group["params"])}
            for group in named["param_groups"]
        ],
    }


def load_numbered_state(
    model: DistributedModule,
    optimizer: torch.optim.Optimizer,
    order: Order,
    state: Mapping[str, Any],
) -> None:
    """Loads the state dict of an optimizer on one process; all ranks call this at once.

    Raises:
        StrategyError: its groups have other numbers of parameters.
    """
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(group) for group in order]:
        raise StrategyError(
            f"the saved optimizer has groups of {sizes} parameters, and this one of "
            f"{[len(group) for group in order]}: make it with the same groups."
        )
    names: dict[Any, str] = {}
    for group, named in zip(state["param_groups"], order, strict=True):
        names |= zip(group["params"], named, strict=True)
    groups = [
        {**group, "params": named}
        for group, named in zip(state["param_groups"], order, strict=True)
    ]
    found = {names.get(key, key): value for key, value in state["state"].items()}
    load_optimizer_state(model, optimizer, {"state": found, "param_groups": groups})


def model_of(
    optimizer: torch.optim.Optimizer, models: Iterable[nn.Module]
) -> DistributedModule | None:
    """The compiled model whose parameters an optimizer holds; None without one.

    On a pipeline stage without parameters the optimizer is empty, and the only compiled model's.
    """
    held = {p for group in optimizer.param_groups for p in group["params"]}
    compiled = [model for model in models if isinstance(model, DistributedModule)]
    if not held and len(compiled) == 1:
        return compiled[0]
    return next((model for model in compiled if held & set(model.parameters())), None)
