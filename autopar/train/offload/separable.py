"""Proof that an optimizer treats parameters one by one, by stepping it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import StrategyError

STEPS = 8
SIDE = 4


def check_separable(
    kind: type[Optimizer], params: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The defaults of an optimizer whose steps of two parameters do not depend on each other.

    Raises:
        StrategyError: stepping two parameters together and apart gives other numbers, or a step
            needs a closure.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise StrategyError(
            f"kind is {kind!r}: give a class of optimizers, such as torch.optim.AdamW"
        )
    first = _first_parameter(params)
    device = torch.device("cpu") if first is None or first.is_meta else first.device
    shape = (SIDE,) * (1 if first is None else first.dim())
    with torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        starts = [torch.randn(shape, device=device) for _ in range(2)]
        # Large, to show clipping by the norm of all; nearly the same in every step, to show
        # step sizes that are learned from all.
        drift = 0.1 * torch.randn(STEPS, 2, *shape, device=device)
        gradients = 100 * (torch.randn(2, *shape, device=device) + drift)
        together = _stepped(kind, options, starts, gradients)
        apart = [
            _stepped(kind, options, starts[i : i + 1], gradients[:, i : i + 1]) for i in (0, 1)
        ]
    if not all(torch.equal(x, y) for x, (y,) in zip(together, apart, strict=True)):
        raise StrategyError(
            f"{kind.__name__} steps all parameters together: two of them, stepped apart, got other "
            "values. Its states cannot be offloaded block by block. Take an optimizer that treats "
            "parameters one by one, such as AdamW."
        )
    return dict(kind([nn.Parameter(starts[0])], **options).defaults)


def _stepped(
    kind: type[Optimizer], options: Mapping[str, Any], starts: Sequence[Tensor], gradients: Tensor
) -> list[Tensor]:
    """Values of parameters after some steps."""
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = kind(parameters, **options)
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        try:
            optimizer.step()
        except TypeError as error:
            raise StrategyError(
                f"{kind.__name__} cannot be stepped without a closure ({error}), so its states "
                "cannot be offloaded block by block. Take one such as AdamW."
            ) from error
    return [parameter.detach() for parameter in parameters]


def _first_parameter(params: Sequence[Any]) -> Tensor | None:
    """The first tensor among parameters, pairs with names, or groups of these."""
    for each in params:
        if isinstance(each, Tensor):
            return each
        inside = list(each["params"]) if isinstance(each, Mapping) else list(each)[1:]
        if (found := _first_parameter(inside)) is not None:
            return found
    return None
