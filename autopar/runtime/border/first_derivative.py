"""`differentiable_once`: gradients that have no derivative, which is said when it is asked for.

Without a graph behind its gradients, torch would take them for constants: penalties on gradients
would train nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.errors import CaptureError

Gradients = tuple[torch.Tensor | None, ...]


def differentiable_once(gradients: Sequence[torch.Tensor | None], reason: str) -> Gradients:
    """Gradients that raise CaptureError where they are differentiated, for a reason."""
    # detached, so that nothing else is reached through them
    plain = [None if each is None else each.detach() for each in gradients]
    results: Gradients = _Underived.apply(torch.zeros((), requires_grad=True), reason, *plain)
    return results


class _Underived(torch.autograd.Function):
    """Gradients as they are; `anchor` requires a gradient, so that asking for theirs comes here."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, reason: str, *gradients: torch.Tensor | None
    ) -> Gradients:
        ctx.reason = reason
        return tuple(None if each is None else each.view_as(each) for each in gradients)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Gradients:
        raise CaptureError(
            "a gradient of a compiled model is differentiated again, as penalties on gradients "
            f"(WGAN-GP, R1), MAML and Hessians do, and here it cannot be: {ctx.reason}. Or keep "
            "this model out of autopar.compile and train it under DistributedDataParallel, or "
            "detach the gradient if it is not to be trained."
        )
