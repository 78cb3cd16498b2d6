"""Gradient clipping by the norm over all pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from autopar.runtime.process_groups import explaining_comm_errors


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    like: torch.Tensor,
    stages: ProcessGroup | None,
) -> torch.Tensor:
    """Scales gradients so that the norm over all stages is at most `max_norm`.

    Args:
        parameters: parameters of this rank; all ranks of their mesh call this at once.
        max_norm: largest norm afterwards.
        norm_type: order of the norm.
        error_if_nonfinite: raise on every rank if the norm is not finite.
        foreach: as for `torch.nn.utils.clip_grad_norm_`.
        like: tensor with the device of the gradients and the dtype of the sum over stages.
        stages: process group along the pipeline, None without stages.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite`.
    """
    order = float(norm_type)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients or stages is None:
        norm = nn.utils.get_total_norm(gradients, order, foreach=foreach)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    else:
        norm = like.new_tensor(0.0 if order >= 0 else math.inf)
    if stages is not None:
        norm = _norm_over_stages(norm.to(like.dtype), order, stages)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {order} of all gradients is {norm.item()}, so they cannot be "
            "clipped. With error_if_nonfinite=False they are scaled by it anyway."
        )
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=foreach)
    return norm


def _norm_over_stages(norm: torch.Tensor, order: float, stages: ProcessGroup) -> torch.Tensor:
    """The norm of all stages' norms."""
    gathered = [torch.empty_like(norm) for _ in range(stages.size())]
    with explaining_comm_errors("clip_grad_norm_"):
        dist.all_gather(gathered, norm, group=stages)
    norms = torch.stack(gathered)
    return norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)
