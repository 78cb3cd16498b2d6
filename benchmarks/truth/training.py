"""Three steps of training, plain or compiled, and the state after them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.truth.recipe import Recipe, loss_of
from tests.harness.training import rows_of

STEPS = 3

OPTIMIZERS = {
    "adamw": functools.partial(torch.optim.AdamW, lr=2e-3),
    "sgd": functools.partial(torch.optim.SGD, lr=2e-2, momentum=0.9),
}


@dataclass(frozen=True)
class Trained:
    """Losses, parameters and buffers (unsaved ones too), and largest gradients of parameters."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, float] = field(default_factory=dict)


def train(
    model: nn.Module, recipe: Recipe, noise: float = 0.0, share: tuple[int, int] = (0, 1)
) -> Trained:
    """Train any model, with relative `noise` on parameters and floating-point inputs.

    `share` is rank and number of ranks, if the model gets the rows of a rank alone.
    """
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter.copy_(_with_noise(parameter, noise))
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    losses, gradients = [], dict[str, float]()
    for step in range(STEPS):
        args, kwargs = pytree.tree_map(
            functools.partial(_with_noise, noise=noise), batch_of(recipe, step, share)
        )
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        for name, parameter in model.named_parameters():
            if noise == 0.0 and type(parameter.grad) is Tensor and parameter.grad.numel():
                largest = parameter.grad.abs().max().item()
                gradients[name] = max(largest, gradients.get(name, 0.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return Trained(losses, {n: t.detach().clone() for n, t in state.items()}, gradients)


def batch_of(recipe: Recipe, step: int, share: tuple[int, int]) -> Any:
    """Return the batch of a step, or a rank's rows of it."""
    batch = recipe.batch(step)
    return batch if share[1] == 1 else rows_of(batch, *share)


def _with_noise(value: Tensor, noise: float) -> Tensor:
    if noise == 0.0 or not value.is_floating_point():
        return value
    return value * (1 + noise * torch.randn(value.shape, dtype=value.dtype))


def deviation(got: Trained, want: Trained) -> tuple[float, str]:
    """Return the worst deviation, relative above 1, and the tensor that has it."""
    losses = (torch.tensor(each.losses, dtype=torch.float64) for each in (got, want))
    found = [(_difference(*losses), "losses")]
    found += [(_difference(got.state.get(name), x), name) for name, x in want.state.items()]
    return max(found)


def _difference(got: Tensor | None, want: Tensor) -> float:
    if got is None or got.shape != want.shape:
        return float("inf")
    if want.numel() == 0:
        return 0.0
    got, want = got.double(), want.double()
    worst = ((got - want).abs().max() / want.abs().max().clamp(min=1.0)).item()
    return worst if worst == worst else float("inf")
