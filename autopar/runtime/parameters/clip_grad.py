"""The norm of all gradients, whichever ranks they are on."""

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
    """Scales gradients down where the norm of all stages' exceeds `max_norm`; gives that norm.

    Args:
        parameters: of this rank; where they are sharded, all ranks of their mesh call this.
        max_norm: of the gradients afterwards.
        norm_type: the order of the norm.
        error_if_nonfinite: raise RuntimeError, on every rank, if it is not finite.
        foreach: as torch has it.
        like: of the device of the gradients, and of the dtype in which stages add their norms up.
        stages: the ranks that hold other stages; None if there are none.
    """
    order = float(norm_type)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients or stages is None:
        norm = nn.utils.get_total_norm(gradients, order, foreach=foreach)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    else:
        norm = like.new_tensor(0.0 if order >= 0 else math.inf)
    if stages is not None:
        norm = _over_stages(norm.to(like.dtype), order, stages)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {order} of all gradients is {norm.item()}, so they cannot be "
            "clipped. With error_if_nonfinite=False they are scaled by it anyway."
        )
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=foreach)
    return norm


def _over_stages(norm: torch.Tensor, order: float, stages: ProcessGroup) -> torch.Tensor:
    """The norm of the norms of all stages."""
    every = [torch.empty_like(norm) for _ in range(stages.size())]
    with explaining_comm_errors("clip_grad_norm_"):
        dist.all_gather(every, norm, group=stages)
    norms = torch.stack(every)
    return norms.sum() if order == 0 else torch.linalg.vector_norm(norms, order)
