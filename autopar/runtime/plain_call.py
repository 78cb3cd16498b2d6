"""`run_plain`: a call of the plain model that changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.capture.state.contents import Snapshot
from autopar.runtime.parameters.distribute import local_part


def has_values(model: nn.Module) -> bool:
    """Whether this rank holds whole values of all parameters."""
    return all(local_part(p).shape == p.shape and not p.is_meta for p in model.parameters())


def values_for(model: nn.Module, copied: Iterable[str] | None = None) -> Mapping[str, torch.Tensor]:
    """Parameters and buffers for `run_plain`, by name.

    Forward may change buffers and the parameters named in `copied`, None for all: they are copies.
    """
    names = None if copied is None else {*copied, *(name for name, _ in model.named_buffers())}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: _alias(x, names is None or name in names) for name, x in tensors.items()}


def run_plain(
    model: nn.Module,
    values: Mapping[str, torch.Tensor],
    leaves: Sequence[Any],
    structure: Any,
    loss_fn: Callable[..., Any] | None,
    autocast: contextlib.AbstractContextManager[Any],
) -> Any:
    """The result of a flattened call with these parameters and buffers.

    Inputs, random generators and Python values of the model stay as they are.
    """
    copies = [_alias(x, True) if isinstance(x, torch.Tensor) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(copies, structure)
    args, target = (args[:-1], args[-1:]) if loss_fn is not None else (args, ())
    snapshot = Snapshot(model)
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), autocast:
            result = torch.func.functional_call(model, dict(values), tuple(args), kwargs)
            return result if loss_fn is None else loss_fn(result, *target)
    finally:
        snapshot.restore()


def _alias(tensor: torch.Tensor, copied: bool) -> torch.Tensor:
    plain = local_part(tensor).detach()
    return (plain.clone() if copied else plain).requires_grad_(tensor.requires_grad)
