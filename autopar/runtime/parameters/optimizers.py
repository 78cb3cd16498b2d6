"""Updates optimizers after a plan has sharded, replaced or dropped their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import StrategyError
from autopar.runtime.parameters.dtensor_layout import distribute_replicated


class OptimizerHook:
    """Adapts every optimizer before its first step.

    Attributes:
        is_registered: whether torch calls the hook.
        seen: optimizers that have stepped.
        awaiting_layout: `id` of parameters whose optimizer state must be distributed.
    """

    def __init__(self) -> None:
        self.is_registered = False
        self.seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.awaiting_layout: set[int] = set()

    def register(self) -> None:
        """Registers the hook, once in a process."""
        if not self.is_registered:
            self.is_registered = True
            register_optimizer_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raises for replaced parameters, removes dropped ones and distributes state."""
        if optimizer in self.seen and not self.awaiting_layout:
            return
        self.seen.add(optimizer)
        _forget_released(optimizer)
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            if getattr(parameter, "replaced_by_autopar", False):
                raise StrategyError(
                    "this optimizer was made before autopar.compile, which has replaced the "
                    "parameters since: it would train none. Make it afterwards, from "
                    "model.parameters() of what autopar.compile returns."
                )
            if isinstance(parameter, DTensor) and id(parameter) in self.awaiting_layout:
                self.awaiting_layout.discard(id(parameter))
                state = optimizer.state.get(parameter, {})
                state |= {key: _distributed_as(parameter, value) for key, value in state.items()}


_HOOK = OptimizerHook()


def distribute_states_before_step(parameters: Iterable[nn.Parameter]) -> None:
    """Distributes optimizer state like its parameter before the next step.

    A checkpoint loaded before the plan exists brings unsharded state.
    """
    _HOOK.awaiting_layout |= {id(p) for p in parameters if p.requires_grad}
    _HOOK.register()


def refuse_stale_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Makes optimizers of replaced parameters raise, since they would train nothing."""
    for parameter in parameters:
        parameter.replaced_by_autopar = True  # type: ignore[attr-defined]
    _HOOK.register()


def release_from_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Makes optimizers forget parameters and their state before the next step."""
    for parameter in parameters:
        parameter.released_by_autopar = True  # type: ignore[attr-defined]
        _HOOK.awaiting_layout.discard(id(parameter))
    _HOOK.seen.clear()
    _HOOK.register()


def _forget_released(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        remaining = []
        for parameter in group["params"]:
            if getattr(parameter, "released_by_autopar", False):
                optimizer.state.pop(parameter, None)
                parameter.grad = None
            else:
                remaining.append(parameter)
        group["params"] = remaining


def _distributed_as(parameter: DTensor, value: Any) -> Any:
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_replicated(value.full_tensor(), parameter.device_mesh, parameter.placements)
