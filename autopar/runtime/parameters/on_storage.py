"""Parameters whose memory is a file on storage; see `autopar.operators.parameters`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar._torch import local_tensor
from autopar.errors import StrategyError
from autopar.operators.parameters import settle, store
from autopar.plan.spec import PlanSpec
from autopar.runtime.parameters.distribute import is_remote


def store_parameters(parameters: Iterable[nn.Parameter], plan: PlanSpec | None) -> None:
    """Moves this rank's parts of parameters that have values to storage, if the plan wants it.

    Raises:
        OffloadError: the disk is full, or the folder cannot be written.
        StrategyError: parameters are on a GPU.
    """
    if plan is None or not plan.offload_parameters:
        return
    _settle_after_steps()
    for parameter in parameters:
        if is_remote(parameter):
            continue
        if parameter.device.type != "cpu":
            raise StrategyError(
                f"parameters on {parameter.device} cannot be offloaded, only those on a CPU: give "
                "Strategy(offload='activations') or none"
            )
        store(local_tensor(parameter), plan.offload_dir)


@functools.cache
def _settle_after_steps() -> None:
    """Has stored parameters written after each step of any optimizer."""
    register_optimizer_step_post_hook(_settle)


def _settle(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not is_remote(parameter):
                settle(local_tensor(parameter))
