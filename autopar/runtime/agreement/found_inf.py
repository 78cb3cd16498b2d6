"""`agree_on_overflows`: all ranks skip a step of torch's GradScaler, or none does.

GradScaler checks the gradients of a rank alone. DTensor reduces the check over its mesh, but only
if the first gradient is sharded, and never over pipeline stages.
"""

from __future__ import annotations

import functools
import weakref

import torch
from torch import distributed as dist
from torch.optim import Optimizer

from autopar._torch import after_unscaling
from autopar.runtime.agreement.optimizer_steps import trains_a_module

_AGREEING: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers of compiled modules, also where their parameters are all on other stages."""


@functools.cache
def agree_on_overflows() -> None:
    """Makes GradScalers reduce flags of compiled modules' optimizers over all ranks."""
    after_unscaling(_agree)


def _agree(
    optimizer: Optimizer, flag: torch.Tensor, found: dict[torch.device, torch.Tensor]
) -> dict[torch.device, torch.Tensor]:
    """The flags of one unscaling by device, the largest of all ranks.

    Args:
        optimizer: optimizer whose gradients were unscaled.
        flag: flag on the scaler's device, for a rank without gradients.
        found: flag of each device with gradients, 1 if one of them is not finite.
    """
    if optimizer not in _AGREEING:
        if not dist.is_initialized() or not trains_a_module(optimizer):
            return found
        _AGREEING.add(optimizer)
    agreed = found or {flag.device: flag}
    for tensor in agreed.values():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return agreed
