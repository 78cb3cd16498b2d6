"""Transforms and modes of functions that programs do not take part in, such as torch.func's."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar._torch import (
    DeviceContext,
    dispatch_modes,
    function_modes,
    is_batched,
    is_transformed,
    is_transforming,
    saved_tensors_hooks,
)
from autopar.core.common.notices import warn_once
from autopar.errors import CaptureError, NumericsWarning


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


def tell_of_modes() -> None:
    """Warns of modes around a call, but torch's own, which change no results."""
    modes = [mode for mode in function_modes() if not isinstance(mode, DeviceContext)]
    for mode in (*modes, *dispatch_modes()):
        if not type(mode).__module__.startswith(("torch.", "autopar.")):
            warn_once(
                NumericsWarning,
                f"a compiled model is called under {type(mode).__name__}, a mode that sees the "
                "functions or operators of its program, not all of the plain model's. Training is "
                "exact if the mode changes no result. Otherwise enter it inside forward.",
            )


def tell_of_saved_tensors_hooks(*, are_called: bool) -> None:
    """Warns of the loop's hooks on saved tensors, but those of torch, which give back the same."""
    hooks = saved_tensors_hooks(False)
    if hooks is None or any(str(hook.__module__).startswith("torch.") for hook in hooks):
        return
    why = (
        "get what its program saves, not what the plain model saves"
        if are_called
        else ("are not called, since stages keep their tensors themselves")
    )
    warn_once(
        NumericsWarning,
        f"hooks on saved tensors around a call of a compiled model {why}. "
        "Training is exact if the hooks give back what they were given.",
    )
