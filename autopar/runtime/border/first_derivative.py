"""`differentiable_once`: gradients that have no derivative, which is said when it is asked for.

Without a graph behind its gradients, torch would take them for constants: penalties on gradients
would train nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.errors import CaptureError

Gradients = tuple[torch.Tensor | None, ...]


def differentiable_once(
    gradients: Sequence[torch.Tensor | None],
    operands: Iterable[torch.Tensor | None],
    reason: str,
) -> Gradients:
    """Gradients that raise CaptureError where they are differentiated, for a reason.

    Args:
        gradients: the gradients to return.
        operands: what they depend on. torch looks for a way to these before it runs a backward, and
            takes the gradient for zero where there is none.
        reason: why there is no derivative.
    """
    # detached, so that nothing else is reached through them
    plain = [None if each is None else each.detach() for each in gradients]
    anchor = torch.zeros((), requires_grad=True)  # also if no operand is trained
    results: Gradients = _Underived.apply(anchor, reason, len(plain), *plain, *operands)
    return results


class _Underived(torch.autograd.Function):
    """Gradients as they are; `anchor` requires a gradient, so that asking for theirs comes here."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, reason: str, count: int, *tensors: torch.Tensor | None
    ) -> Gradients:
        ctx.reason = reason
        return tuple(None if each is None else each.view_as(each) for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> Gradients:
        raise CaptureError(
            "a gradient of a compiled model is differentiated again, as penalties on gradients "
            f"(WGAN-GP, R1), MAML and Hessians do, and here it cannot be: {ctx.reason}. Or keep "
            "this model out of autopar.compile and train it under DistributedDataParallel, or "
            "detach the gradient if it is not to be trained."
        )
