"""`differentiable_once`: a backward whose gradients have no derivative, which is said when asked.

A program holds the forward and its first derivative. Without a graph behind its gradients, torch
would take them for constants: penalties on gradients would train nothing, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autopar.errors import CaptureError

Gradients = tuple[torch.Tensor | None, ...]


def differentiable_once(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """The backward of an autograd function that cannot be differentiated again.

    torch's own `once_differentiable` tells only if the incoming gradient requires one, which that
    of a loss does not.
    """
    once = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: torch.Tensor | None) -> Gradients:
        results: Gradients = once(ctx, *gradients)
        if not torch.is_grad_enabled():  # create_graph=True enables it
            return results
        return _Underived.apply(torch.zeros((), requires_grad=True), *results)

    return run


class _Underived(torch.autograd.Function):
    """Gradients as they are; `anchor` requires a gradient, so that asking for theirs comes here."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor | None) -> Gradients:
        return tuple(None if each is None else each.view_as(each) for each in gradients)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Gradients:
        raise CaptureError(
            "a gradient of a compiled model is differentiated again, as penalties on gradients "
            "(WGAN-GP, R1), MAML and Hessians do: autopar differentiates a model once. Keep this "
            "model out of autopar.compile and train it under DistributedDataParallel, or detach "
            "the gradient if it is not to be trained."
        )
