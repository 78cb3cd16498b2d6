"""`OptimizerSteps`: optimizer steps since a module's last call, which ranks compare."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

MAX_STEPS = 1000
"""Steps kept between two calls."""


@dataclass(eq=False)
class OptimizerSteps:
    """Steps of optimizers that train one module, since its last call.

    Attributes:
        parameter_ids: `id` of each parameter; the module keeps them alive.
        steps: text and number of parameter groups of each step, the oldest first.
        coupling: name of an optimizer that keeps its state in one of its parameters, if any, and
            so steps all of them together.
    """

    parameter_ids: frozenset[int] = frozenset()
    steps: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    coupling: str = ""

    def __post_init__(self) -> None:
        _register()
        _OBSERVERS.add(self)

    def restart(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forgets the steps and records those with these parameters from now on."""
        self.steps.clear()
        self.parameter_ids = frozenset(id(p) for p in parameters)

    @property
    def text(self) -> str:
        return "; ".join(text for text, _ in self.steps) or "no step"

    @property
    def num_groups(self) -> int:
        return max((groups for _, groups in self.steps), default=1)


_OBSERVERS: weakref.WeakSet[OptimizerSteps] = weakref.WeakSet()


@functools.cache
def _register() -> None:
    register_optimizer_step_post_hook(_record_step)


def _record_step(optimizer: Optimizer, *_: Any) -> None:
    """Records a step for each module whose parameters the optimizer trains."""
    own = ids_of(optimizer)
    text = f"{type(optimizer).__name__} with {hyperparameters(optimizer)}"
    for observer in _OBSERVERS:
        if not own.isdisjoint(observer.parameter_ids):
            observer.steps.append((text, len(optimizer.param_groups)))
            if _is_coupled(optimizer):
                observer.coupling = type(optimizer).__name__


def ids_of(optimizer: Optimizer) -> set[int]:
    """`id` of each parameter of an optimizer, with those that it left to other stages."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return set(map(id, [*parameters, *getattr(optimizer, "left_out_by_autopar", ())]))


def _is_coupled(optimizer: Optimizer) -> bool:
    """Whether an optimizer has a state for a part only of a group that it has just stepped."""
    # Group by group: one without momentum has no state beside one with it, and couples nothing.
    for group in optimizer.param_groups:
        stepped = [p for p in group["params"] if p.grad is not None and not p.is_meta]
        if len({bool(optimizer.state.get(p)) for p in stepped}) > 1:
            return True
    return False


def trains_a_module(optimizer: Optimizer) -> bool:
    """Whether an optimizer has parameters of a module that ranks train together."""
    own = ids_of(optimizer)
    return any(not own.isdisjoint(observer.parameter_ids) for observer in _OBSERVERS)


def hyperparameters(optimizer: Optimizer) -> str:
    """The hyperparameters of each parameter group as text, without options that are off."""
    groups = [
        ", ".join(
            f"{key}={_printable(value)}"
            for key, value in group.items()
            if key != "params" and value is not None and value is not False
        )
        for group in optimizer.param_groups
    ]
    return " | ".join(groups)


def _printable(value: object) -> object:
    if isinstance(value, Tensor):
        # Reading a tensor on an accelerator would make the host wait for it at every step.
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else "a tensor"
    if isinstance(value, (bool, int, float, str, tuple, list)):
        return value
    return type(value).__name__
