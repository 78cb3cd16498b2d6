"""The plain model trained on one process, and how far something is from it."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.harness.models import Batch, Case, OptimizerFactory


class Reference(NamedTuple):
    """The losses of every step and the state after the last."""

    losses: list[float]
    state: dict[str, Tensor]


def to_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a nested batch."""

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float else leaf

    return pytree.tree_map(cast, batch)


def reference(
    case: Case,
    steps: int,
    dtype: torch.dtype,
    optimizer_factory: OptimizerFactory,
    rows: int,
) -> Reference:
    """Train the plain model on one process; step `i` sees `case.batch(rows, seed=i)`."""
    model = case.make().to(dtype)
    optimizer = optimizer_factory(model.parameters())
    losses = train_steps(model, optimizer, case, batches(case, range(steps), rows, dtype))
    return Reference(losses, snapshot(model.state_dict()))


def batches(
    case: Case, steps: Iterable[int], rows: int, dtype: torch.dtype = torch.float64
) -> Iterator[Batch]:
    """The batch of each step."""
    return (to_dtype(case.batch(rows, step), dtype) for step in steps)


def train_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, case: Case, given: Iterable[Batch]
) -> list[float]:
    """One step on each batch; the losses."""
    losses = []
    for args, kwargs in given:
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def snapshot(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Detached copies of a state dict's tensors."""
    return {name: value.detach().clone() for name, value in state.items()}


def relative_error(got: Tensor | float, want: Tensor | float) -> float:
    """The norm of the difference over that of `want`; absolute near zero, inf for NaN.

    Near zero lies what is zero but for rounding: a bias of keys has no gradient.
    """
    a, b = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (got, want))
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    difference, norm = (a - b).norm().item(), b.norm().item()
    error = difference / norm if norm > 1e-9 else difference
    return math.inf if math.isnan(error) else error


def worst_loss(got: Reference, want: Reference) -> float:
    """The largest relative error of a step's loss."""
    return max(relative_error(a, b) for a, b in zip(got.losses, want.losses, strict=True))


def worst_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest relative error between two state dicts of the same names, and whose it is."""
    assert got.keys() == want.keys(), f"names differ: {sorted(got.keys() ^ want.keys())}"
    return max((relative_error(got[name], want[name]), name) for name in want)
