"""Checks whether a model that cannot be captured also fails without autopar."""

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

_TRACING_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def check_runs(
    model: nn.Module,
    leaves: Sequence[Any],
    structure: Any,
    loss_fn: Callable[..., Any] | None,
    autocast: AbstractContextManager[Any],
    reason: CaptureError,
) -> None:
    """Runs a call of the plain model and drops the result.

    Parameters, buffers, inputs and random generators keep their values. Nothing runs if autopar
    itself refused the model, if only tracing can cause the error, or if parameters are sharded.

    Args:
        model: the plain model.
        leaves: flattened arguments of the call.
        structure: tree structure of the arguments.
        loss_fn: computes the loss from the result and the last argument.
        autocast: autocast context of the call.
        reason: the error of the capture.

    Raises:
        ModelError: the model raises; its error is the cause.
    """
    from_autopar = reason.__cause__ is None or isinstance(reason.__cause__, _TRACING_ERRORS)
    if from_autopar or _is_sharded(model):
        return
    state = {name: _copy(tensor) for name, tensor in _state(model).items()}
    copies = [_copy(x) if isinstance(x, torch.Tensor) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(copies, structure)
    args, target = (args[:-1], args[-1:]) if loss_fn is not None else (args, ())
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())), autocast, torch.enable_grad():
            result = torch.func.functional_call(model, state, tuple(args), kwargs)
            if loss_fn is not None:
                loss_fn(result, *target)
    except torch.OutOfMemoryError:
        return  # the whole batch may be too large for one rank
    except Exception as error:
        raise ModelError(
            f"your model raised {type(error).__name__}{user_frame(error)}: {first_line(error)}. "
            f"{type(model).__name__} does so without autopar too."
        ) from error


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_sharded(model: nn.Module) -> bool:
    dtensors = [p for p in model.parameters() if isinstance(p, DTensor)]
    return any(local_part(x).shape != x.shape for x in dtensors)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return local_part(tensor).detach().clone().requires_grad_(tensor.requires_grad)
