"""Steps that optimizers took, with which hyperparameters: ranks compare them at the next call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

REMEMBERED = 1000
"""Steps that are kept until a module asks for them."""


@dataclass(frozen=True)
class Stepped:
    """One step of an optimizer.

    Attributes:
        number: of the step, over all optimizers of the process.
        text: its class and hyperparameters.
        groups: number of its groups of parameters.
        parameters: ids of what it trains.
    """

    number: int
    text: str
    groups: int
    parameters: frozenset[int]


class Log:
    """Listens to every optimizer of the process."""

    def __init__(self) -> None:
        self.watching = False
        self.count = 0
        self.steps: deque[Stepped] = deque(maxlen=REMEMBERED)

    def watch(self) -> None:
        """Begins to listen, once in a process."""
        if not self.watching:
            self.watching = True
            register_optimizer_step_post_hook(self)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Notes a step."""
        self.count += 1
        text = f"{type(optimizer).__name__} with {hyperparameters(optimizer)}"
        ids = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
        self.steps.append(Stepped(self.count, text, len(optimizer.param_groups), ids))


_LOG = Log()


def watch() -> None:
    """Notes every step of every optimizer from now on."""
    _LOG.watch()


@dataclass(frozen=True)
class Steps:
    """Steps of some parameters.

    Attributes:
        last: number of the last step of the process.
        text: equal on ranks that stepped alike.
        groups: of parameters, the most that one of their optimizers has.
    """

    last: int
    text: str
    groups: int


def since(number: int, parameters: Iterable[nn.Parameter]) -> Steps:
    """The steps after one of this number that some of these parameters took."""
    ids = {id(p) for p in parameters}
    found = [s for s in _LOG.steps if s.number > number and not ids.isdisjoint(s.parameters)]
    text = "; ".join(own.text for own in found) or "no step"
    return Steps(_LOG.count, text, max((own.groups for own in found), default=1))


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
