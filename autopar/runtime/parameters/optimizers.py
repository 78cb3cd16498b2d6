"""What optimizers have to be told of: parameters that a plan has laid out, or replaced."""

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
    """Looks at every optimizer before it steps for the first time."""

    def __init__(self) -> None:
        self.watching = False
        self.seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.laid_out: set[int] = set()

    def watch(self) -> None:
        """Begins to look, once in a process."""
        if not self.watching:
            self.watching = True
            register_optimizer_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuses an optimizer of replaced parameters; drops released ones; lays out state."""
        if optimizer in self.seen and not self.laid_out:
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
            if isinstance(parameter, DTensor) and id(parameter) in self.laid_out:
                self.laid_out.discard(id(parameter))
                state = optimizer.state.get(parameter, {})
                state |= {key: _as(parameter, value) for key, value in state.items()}


_BEFORE_STEP = OptimizerHook()


def distribute_states_before_step(parameters: Iterable[nn.Parameter]) -> None:
    """Lays optimizer state out as its parameter lies by then, before the next step.

    A checkpoint may be loaded before the plan is made. The state that it brings is whole, and
    would stay so: a step with it is right, but needs the memory and the traffic of whole states.
    """
    _BEFORE_STEP.laid_out |= {id(p) for p in parameters if p.requires_grad}
    _BEFORE_STEP.watch()


def refuse_stale_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Lets an optimizer that still holds these parameters raise instead of training nothing."""
    for parameter in parameters:
        parameter.replaced_by_autopar = True  # type: ignore[attr-defined]
    _BEFORE_STEP.watch()


def release_from_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Lets optimizers forget parameters, and their state, before their next step."""
    for parameter in parameters:
        parameter.released_by_autopar = True  # type: ignore[attr-defined]
        _BEFORE_STEP.laid_out.discard(id(parameter))
    _BEFORE_STEP.seen.clear()
    _BEFORE_STEP.watch()


def _forget_released(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        kept = []
        for parameter in group["params"]:
            if getattr(parameter, "released_by_autopar", False):
                optimizer.state.pop(parameter, None)
                parameter.grad = None
            else:
                kept.append(parameter)
        group["params"] = kept


def _as(parameter: DTensor, value: Any) -> Any:
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_replicated(value.full_tensor(), parameter.device_mesh, parameter.placements)
