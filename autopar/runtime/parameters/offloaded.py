"""Parameters whose memory is a lower level; see `autopar.core.operators.parameters`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar._torch import local_tensor
from autopar.core.operators.parameters import settle, store
from autopar.core.plan.decisions import Decisions
from autopar.errors import StrategyError
from autopar.runtime.parameters.distribute import is_remote


def store_parameters(parameters: Iterable[nn.Parameter], decisions: Decisions | None) -> None:
    """Moves this rank's parts of parameters that have values there, if the plan wants it.

    Raises:
        OffloadError: the disk is full, the folder cannot be written, or the host lacks memory.
        StrategyError: parameters are on a GPU, and the plan has a folder.
    """
    if decisions is None or not decisions.offload_parameters:
        return
    _settle_after_steps()
    for parameter in parameters:
        if is_remote(parameter):
            continue
        if parameter.device.type != "cpu" and decisions.offload_dir:
            raise StrategyError(
                f"parameters on {parameter.device} cannot go to {decisions.offload_dir}, only to "
                "host memory: plan without offload_dir"
            )
        store(local_tensor(parameter), decisions.offload_dir)


@functools.cache
def _settle_after_steps() -> None:
    """Has stored parameters written after each step of any optimizer."""
    register_optimizer_step_post_hook(_settle)


def _settle(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not is_remote(parameter):
                settle(local_tensor(parameter))
