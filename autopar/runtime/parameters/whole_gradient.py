"""`OwnPart` and `WholeValue`: a whole tensor and this rank's part of it, for autograd.

Where a loop combines a value of a model with a sharded parameter of the same shape, such as
`(model(x) - weight).square()`, autograd gives the value a sharded gradient (`whole_gradient`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.runtime.parameters.sharded import in_layout_of
from autopar.runtime.parameters.unread import UnreadTensor
from autopar.runtime.parameters.whole_values import own_part, read_whole

Backward = Callable[..., Any]


def none_for_none(backward: Backward) -> Backward:
    """A backward that gives None where its gradient is None, as autograd's own operators do.

    The forward is to call `ctx.set_materialize_grads(False)`; else None arrives as zeros.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if gradients[0] is None:
            return (None,) * len(ctx.needs_input_grad)
        return backward(ctx, *gradients)

    return checked


class OwnPart(torch.autograd.Function):
    """A tensor that every rank has whole, in the layout of a parameter."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter = parameter
        return in_layout_of(parameter, own_part(whole, parameter).contiguous().clone())

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return WholeValue.apply(gradients[0], ctx.parameter), None


class WholeValue(torch.autograd.Function):
    """The whole of a tensor; all ranks call this at once."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, parameter: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.parameter = parameter
        if isinstance(value, UnreadTensor):
            return value.read().clone()
        return read_whole(value) if isinstance(value, DTensor) else value.view_as(value)

    @staticmethod
    @none_for_none
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return OwnPart.apply(gradients[0], ctx.parameter), None


def whole_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a value that every rank has whole; all ranks call this at once."""
    if not isinstance(gradient, DTensor):
        return gradient
    whole_value: torch.Tensor = WholeValue.apply(gradient, gradient)
    return whole_value
