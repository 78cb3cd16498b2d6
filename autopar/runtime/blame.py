"""Whether it is the model itself that raises, where a call of it could not be captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar._torch import DataDependentOutputException, DynamicOutputShapeException, pytree
from autopar.capture.provenance import first_line, user_frame
from autopar.errors import CaptureError, ModelError
from autopar.runtime.parameters.distribute import local_part

_OF_TRACING = (DataDependentOutputException, DynamicOutputShapeException)


def check_runs(
    model: nn.Module,
    leaves: Sequence[Any],
    structure: Any,
    loss_fn: Callable[..., Any] | None,
    autocast: AbstractContextManager[Any],
    reason: CaptureError,
) -> None:
    """Runs a call of the plain model as it would run without autopar, and forgets the result.

    Parameters, buffers, inputs and random generators are left as they were. Nothing is run where
    autopar itself refused the model, the reason can only be tracing, or parameters are sharded.

    Raises:
        ModelError: the model raises; its error is the cause.
    """
    own = reason.__cause__ is None or isinstance(reason.__cause__, _OF_TRACING)
    if own or _is_sharded(model):
        return
    state = {name: _copied(tensor) for name, tensor in _state(model).items()}
    copies = [_copied(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(copies, structure)
    args, target = (args[:-1], args[-1:]) if loss_fn is not None else (args, ())
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), autocast, torch.enable_grad():
            result = torch.func.functional_call(model, state, tuple(args), kwargs)
            if loss_fn is not None:
                loss_fn(result, *target)
    except torch.OutOfMemoryError:
        return  # the whole batch was too much for one rank
    except Exception as error:
        raise ModelError(
            f"your model raised {type(error).__name__}{user_frame(error)}: {first_line(error)}. "
            f"{type(model).__name__} does so without autopar too."
        ) from error


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_sharded(model: nn.Module) -> bool:
    parts = [p for p in model.parameters() if isinstance(p, DTensor)]
    return any(local_part(part).shape != part.shape for part in parts)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor).detach().clone().requires_grad_(tensor.requires_grad)
