"""What an optimizer keeps for each parameter, found by stepping it on a small tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from autopar.errors import StrategyError

_SIDE = 64


def optimizer_state_ratio(
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
) -> float:
    """Bytes of optimizer state for each byte of parameter: AdamW 2, SGD 0, with momentum 1.

    Single numbers, such as the count of steps, are left out.

    Args:
        optimizer: a class or function that makes an optimizer from parameters, or an optimizer,
            of which one like it is made.
    """
    parameter = torch.nn.Parameter(torch.zeros(_SIDE, _SIDE, device="cpu"))
    try:
        tried = make_optimizer(optimizer, [parameter])
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            tried.step(lambda: 0.0)
    except Exception as error:
        raise StrategyError(
            f"optimizer {optimizer!r} cannot be made from parameters and stepped: {error}. Pass a "
            f"class such as torch.optim.AdamW, or functools.partial(torch.optim.SGD, momentum=0.9)"
        ) from error
    kept = {t.untyped_storage().data_ptr(): t for t in _tensors(tried.state) if t.numel() > 1}
    for own in (parameter, parameter.grad):
        if own is not None:
            kept.pop(own.untyped_storage().data_ptr(), None)
    state = sum(t.numel() * t.element_size() for t in kept.values())
    return state / (parameter.numel() * parameter.element_size())


def make_optimizer(
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
    parameters: Iterable[torch.nn.Parameter],
) -> torch.optim.Optimizer:
    """A new optimizer of the same kind over these parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer(parameters)
    accepted = inspect.signature(type(optimizer)).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    return type(optimizer)(parameters, **options)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts and lists."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)
