"""`compile_model`: the distributed module of a model, as `autopar.compile` returns it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autopar.capture.model_info import device_of
from autopar.core.common.notices import say, warn_once
from autopar.core.environment import asks_for_plain, untested_torch
from autopar.core.plan.outer import LocalSteps
from autopar.cost_model.measurement.measure import measure
from autopar.errors import AutoparWarning, StrategyError
from autopar.options import CompileOptions
from autopar.runtime.agreement.consensus import broadcast_from_rank0
from autopar.runtime.module import DistributedModule
from autopar.runtime.start import ensure_process_group
from autopar.session.build_module import build_module
from autopar.session.launchers import adopt_launcher
from autopar.session.local_steps import build_groups
from autopar.session.plan_model import plan_model


def compile_model(model: nn.Module, options: CompileOptions) -> DistributedModule:
    """The model, training across all ranks; all ranks call this at once.

    Raises: what `autopar.compile` lists.
    """
    if text := untested_torch(torch.__version__):
        warn_once(AutoparWarning, text)
    if asks_for_plain():
        options = options.in_plain_torch()
    adopt_launcher()
    device = device_of(model, options.device)
    ranks = ensure_process_group(device, options.world_size, options.timeout_s)
    fixed = options.fixed
    if ranks == 1 and options.world_size is None and fixed.zero:
        say(
            f"one process runs, so that ZeRO {fixed.zero} divides nothing. Start the script by "
            "autopar run SCRIPT --nproc N, or by torchrun."
        )
    group_ranks: int | None = None
    steps = fixed.local_steps
    if options.plan is not None:
        group_ranks = options.plan.world_size
        steps = None if options.plan.local_steps is None else options.plan.local_steps.local
    elif fixed.may_sync and steps is None and ranks > 1:
        group_ranks, steps = _planned_steps(model, options, ranks, device)
    if steps is not None:
        return build_groups(model, options, steps, group_ranks, ranks, device)
    return build_module(model, options, device, ranks)


def _planned_steps(
    model: nn.Module, options: CompileOptions, ranks: int, device: torch.device
) -> tuple[int | None, LocalSteps | None]:
    """Ranks of a group and the local steps that a plan by rank 0 takes, or None twice."""
    if options.example_inputs is None:
        raise StrategyError(
            f"lossy={options.lossy!r}: local steps are chosen before the first call: give compile "
            "example_inputs=, or Strategy(sync_every=...)"
        )
    cluster = options.cluster or measure(device=device)
    options = replace(options, world_size=ranks, cluster=cluster)
    plan = broadcast_from_rank0(lambda: plan_model(model, options))
    steps = plan.local_steps
    return (None, None) if steps is None else (plan.world_size, steps.local)
