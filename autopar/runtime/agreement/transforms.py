"""Transforms of functions, such as those of torch.func, that programs do not take part in."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar._torch import is_batched, is_transformed, is_transforming
from autopar.errors import CaptureError


def check_not_transformed() -> None:
    """Raises CaptureError if a transform of torch.func, or forward mode, calls a compiled model."""
    if is_transforming():
        raise CaptureError(
            "a compiled model is called inside of a transform of torch.func (grad, vmap, jvp, "
            "hessian) or of torch.autograd.forward_ad, which autopar does not offer. "
            "torch.autograd.grad(create_graph=True) and torch.autograd.functional compute the same "
            "derivatives."
        )


def check_not_batched(gradients: Iterable[torch.Tensor]) -> None:
    """Raises CaptureError if a backward runs for many gradients at once, under vmap."""
    if any(is_batched(each) or is_transformed(each) for each in gradients):
        raise CaptureError(
            "a backward runs for many gradients at once (vectorize=True, is_grads_batched=True, "
            "torch.func.vmap), which several ranks cannot: leave that out."
        )
