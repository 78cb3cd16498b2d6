"""What optimizers did so far: how often each stepped, and with which hyperparameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


@dataclass
class Stepped:
    """Steps of one optimizer.

    Attributes:
        steps: how many.
        hyperparameters: at the last of them, as text.
        groups: number of its groups of parameters.
        parameters: ids of what it trained then.
    """

    steps: int
    hyperparameters: str
    groups: int
    parameters: frozenset[int]


class Log:
    """Listens to every optimizer of the process."""

    def __init__(self) -> None:
        self.watching = False
        self.known: weakref.WeakKeyDictionary[Optimizer, Stepped] = weakref.WeakKeyDictionary()

    def watch(self) -> None:
        """Begins to listen, once in a process."""
        if not self.watching:
            self.watching = True
            register_optimizer_step_post_hook(self)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Notes a step."""
        ids = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
        before = self.known.get(optimizer)
        steps = before.steps if before is not None else 0
        groups = len(optimizer.param_groups)
        self.known[optimizer] = Stepped(steps + 1, hyperparameters(optimizer), groups, ids)


_LOG = Log()


def watch() -> None:
    """Notes every step of every optimizer from now on."""
    _LOG.watch()


@dataclass(frozen=True)
class Steps:
    """Steps of all optimizers of some parameters.

    Attributes:
        text: equal on ranks that stepped alike.
        groups: of parameters, over all of these optimizers.
    """

    text: str
    groups: int


def of(parameters: Iterable[nn.Parameter]) -> Steps:
    """The steps of all optimizers that train some of these parameters."""
    ids = {id(p) for p in parameters}
    found = [
        (f"{type(optimizer).__name__} after {own.steps} steps with {own.hyperparameters}", own)
        for optimizer, own in list(_LOG.known.items())
        if not ids.isdisjoint(own.parameters)
    ]
    text = "; ".join(text for text, _ in found) or "no steps yet"
    return Steps(text, sum(own.groups for _, own in found))


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
    if isinstance(value, (bool, int, float, str, tuple, list, type(None))):
        return value
    return type(value).__name__
