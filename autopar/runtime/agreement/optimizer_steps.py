"""Steps that optimizers took, with which hyperparameters: ranks compare them at the next call."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

MAX_STEPS = 1000
"""Steps between two calls that are kept."""


@dataclass(frozen=True)
class OptimizerStep:
    """One step of an optimizer.

    Attributes:
        text: its class and hyperparameters.
        groups: number of its groups of parameters.
    """

    text: str
    num_groups: int


@dataclass(eq=False)
class OptimizerSteps:
    """Steps that optimizers took with the parameters of one module since its last call.

    Attributes:
        ids: of the parameters, all of which are alive as long as the module is.
        taken: the steps, the oldest first.
    """

    parameter_ids: frozenset[int] = frozenset()
    steps: deque[OptimizerStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))

    def __post_init__(self) -> None:
        _listen(self)

    def restart(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forgets the steps so far, and notes those with these parameters from now on."""
        self.steps.clear()
        self.parameter_ids = frozenset(id(p) for p in parameters)

    @property
    def text(self) -> str:
        """A text that is equal on ranks that stepped alike."""
        return "; ".join(step.text for step in self.steps) or "no step"

    @property
    def num_groups(self) -> int:
        """The most groups of parameters that one of the optimizers has."""
        return max((step.num_groups for step in self.steps), default=1)


_LISTENING: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()


def _listen(steps: OptimizerSteps) -> None:
    if not _WATCHING:
        _WATCHING.append(register_optimizer_step_post_hook(_note))
    _LISTENING.add(steps)


_WATCHING: list[Any] = []


def _note(optimizer: Optimizer, *_: Any) -> None:
    """Notes a step of an optimizer for each module whose parameters it trains."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    text = f"{type(optimizer).__name__} with {hyperparameters(optimizer)}"
    for steps in _LISTENING:
        if any(id(p) in steps.parameter_ids for p in parameters):
            steps.steps.append(OptimizerStep(text, len(optimizer.param_groups)))


def hyperparameters(optimizer: Optimizer) -> str:
    """The hyperparameters of each group of an optimizer, as text, without options that are off."""
    groups = [
        ", ".join(
            f"{key}={_plain(value)}"
            for key, value in group.items()
            if key != "params" and value is not None and value is not False
        )
        for group in optimizer.param_groups
    ]
    return " | ".join(groups)


def _plain(value: object) -> object:
    """A value as text that is the same on ranks with the same value."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else "a tensor"
    if isinstance(value, (bool, int, float, str, tuple, list)):
        return value
    return type(value).__name__
