"""Three steps of training, plain or compiled, and what is left of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.truth.model import Recipe, loss_of
from tests.harness.training import rows_of

STEPS = 3

OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=2e-3),
    "sgd": functools.partial(torch.optim.SGD, lr=2e-2, momentum=0.9),
}


@dataclass(frozen=True)
class Trained:
    """What three steps leave behind.

    Attributes:
        losses: loss of every step.
        state: parameters and buffers by name, those that are not saved too.
        gradients: largest absolute gradient of every parameter over the steps.
    """

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, float] = field(default_factory=dict)


def train(
    model: nn.Module, recipe: Recipe, noise: float = 0.0, share: tuple[int, int] = (0, 1)
) -> Trained:
    """Train any model.

    Args:
        model: plain or compiled.
        recipe: its data and optimizer.
        noise: relative, on parameters and floating-point inputs.
        share: rank and number of ranks, if the model is given the rows of a rank alone.
    """
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter.copy_(_shaken(noise)(parameter))
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    losses, gradients = [], {}
    for step in range(STEPS):
        args, kwargs = _noisy(batch_of(recipe, step, share), noise)
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        for name, parameter in model.named_parameters():
            if noise == 0.0 and type(parameter.grad) is Tensor:
                largest = parameter.grad.abs().max().item() if parameter.grad.numel() else 0.0
                gradients[name] = max(largest, gradients.get(name, 0.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return Trained(losses, {n: t.detach().clone() for n, t in state.items()}, gradients)


def batch_of(recipe: Recipe, step: int, share: tuple[int, int]) -> Any:
    """The batch of a step, or the rows of a rank of it."""
    batch = recipe.batch(step)
    return batch if share[1] == 1 else rows_of(batch, *share)


def _noisy(batch: Any, noise: float) -> Any:
    if noise == 0.0:
        return batch
    args, kwargs = batch
    return tuple(map(_shaken(noise), args)), {n: _shaken(noise)(x) for n, x in kwargs.items()}


def _shaken(noise: float) -> Any:
    def shake(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shake(x) for name, x in value.items()}
        if not value.is_floating_point():
            return value
        return value * (1 + noise * torch.randn(value.shape, dtype=value.dtype))

    return shake


def deviation(got: Trained, want: Trained) -> tuple[float, str]:
    """Worst deviation of a loss or a tensor, relative where it exceeds 1, and whose it is."""
    found = [(_apart(_column(got.losses), _column(want.losses)), "losses")]
    for name, value in want.state.items():
        found.append((_apart(got.state.get(name), value), name))
    return max(found)


def _apart(got: Tensor | None, want: Tensor) -> float:
    if got is None or got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = got.double(), want.double()
    apart = ((got - want).abs().max() / want.abs().max().clamp(min=1.0)).item()
    return apart if apart == apart else float("inf")


def _column(losses: list[float]) -> Tensor:
    return torch.tensor(losses, dtype=torch.float64)
