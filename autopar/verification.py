"""`verify`: one step of a plan beside one of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch import pytree
from autopar.api import compile
from autopar.arguments import check
from autopar.captures import flattened
from autopar.plan import Plan
from autopar.runtime.agreement import from_everywhere, is_live


@dataclass(frozen=True)
class Verification:
    """Worst relative differences (by norm) between a plan and the plain model, over one step.

    Attributes:
        loss: of the loss.
        gradient: of a gradient, and the name of its parameter.
        parameter: of a parameter after the optimizer's step, and its name.
    """

    loss: float
    gradient: tuple[float, str]
    parameter: tuple[float, str]

    @property
    def worst(self) -> float:
        """The largest of the three."""
        return max(self.loss, self.gradient[0], self.parameter[0])

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.1e}, gradient {self.gradient[0]:.1e} ({self.gradient[1]}), "
            f"parameter {self.parameter[0]:.1e} ({self.parameter[1]})"
        )


def verify(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    example_inputs: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    double: bool = True,
    **options: Any,
) -> Verification:
    """Runs one step of `plan` (or of what `compile` chooses) beside one of the plain model.

    Every rank calls it with the same global batch. The model itself is not changed.

    Args:
        model: the model; copied.
        plan: a plan for the ranks that are running; None to let `compile` choose.
        example_inputs: the global batch: a tuple of arguments or a dict of keyword arguments.
        loss: takes the loss out of what the model returns; None if it returns the loss.
        optimizer: class or factory; its learning rate is 1e-2 where it takes one.
        double: compare in float64, where differences are those of summation order alone.
        options: of `compile`.
    """
    check(
        "example_inputs",
        model=model,
        plan=plan,
        example_inputs=example_inputs,
        loss=loss,
        optimizer=optimizer,
        double=double,
        **options,
    )
    take = loss or (lambda result: result)
    dtype = torch.float64 if double else None
    plain = _cast(copy.deepcopy(model), dtype)
    leaves, structure = flattened(example_inputs)
    args, kwargs = pytree.tree_unflatten([_cast(x, dtype) for x in leaves], structure)
    parallel = compile(_cast(copy.deepcopy(model), dtype), plan=plan, **options)
    state = {name: _whole(p).clone() for name, p in parallel.state_dict().items()}
    plain.load_state_dict(state)
    results = [_step(m, args, kwargs, take, optimizer) for m in (plain, parallel)]
    (want, want_gradients, want_parameters), (have, gradients, parameters) = results
    return Verification(
        loss=_difference(have, want),
        gradient=_worst(gradients, want_gradients),
        parameter=_worst(parameters, want_parameters),
    )


def _step(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    take: Callable[[Any], torch.Tensor],
    optimizer: Callable[..., torch.optim.Optimizer],
) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    value = take(model(*args, **kwargs))
    value.backward()
    tuned = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    named = dict(model.named_parameters())
    gradients = {n: _whole(p.grad) for n, p in named.items() if p.grad is not None}
    tuned.step()
    return value.detach(), gradients, {n: _whole(p.detach()) for n, p in named.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    if isinstance(value, nn.Module):
        return value.to(dtype)
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def _worst(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The worst difference of what the ranks have, each of the stages of its own."""
    own = {name: _difference(have[name], want[name]) for name in have.keys() & want.keys()}
    own |= dict.fromkeys(have.keys() - want.keys(), float("inf"))
    found: dict[str, float] = {}
    for errors in from_everywhere(own) if is_live() else [own]:
        found |= {name: max(error, found.get(name, 0.0)) for name, error in errors.items()}
    if missing := sorted(found.keys() ^ want.keys()):
        return float("inf"), f"only one side has {missing}"
    return max(((error, name) for name, error in found.items()), default=(0.0, ""))


def _difference(have: torch.Tensor, want: torch.Tensor) -> float:
    scale = want.norm().item()
    difference = (have - want).norm().item()
    return difference / scale if scale > 1e-12 else difference
