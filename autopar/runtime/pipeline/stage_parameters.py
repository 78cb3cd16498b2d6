"""Keeps the parameters of a rank's stages, and the names and shapes of the others.

A remote parameter stays in its module, on the meta device, so that captures and state dicts see
the whole model.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import without_weight_references
from autopar.core.common.world import rank
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.plan.layout import Layout
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.errors import StrategyError
from autopar.runtime.group_cache import mesh_over
from autopar.runtime.parameters.distribute import (
    distribute_parameters,
    is_remote,
    local_part,
    parameter_like,
    swap_parameter,
)
from autopar.runtime.parameters.optimizers import leave_out_of_optimizers
from autopar.runtime.parameters.remote import mark_remote
from autopar.runtime.parameters.sharded import in_layout_of
from autopar.runtime.parameters.shared_memory import check_own_memory
from autopar.runtime.parameters.strided_shard import register_strided_shard_support
from autopar.runtime.process_groups import explaining_comm_errors


def stage_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of the ranks that share a stage."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "pp")
    if names:
        return mesh[names]
    # parameters may be DTensors already, and these need a mesh even if one rank has the stage
    single_ranks = mesh.mesh.view(-1, 1)
    return mesh_over(torch.device(mesh.device_type), single_ranks, ("pp", DATA_AXIS))[DATA_AXIS]


def distribute_plan_parameters(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> None:
    """Shards the parameters under a plan and drops parameters of other ranks' stages."""
    has_stages, layout = plan.pp_size > 1, Layout(plan)
    awaits_layout = has_stages and any(isinstance(p, DTensor) for p in model.parameters())
    if mesh is not None and (layout.shards_parameters or has_stages):
        check_own_memory(model)
    if mesh is not None and (layout.shards_parameters or awaits_layout):
        if layout.interleaves:
            register_strided_shard_support()
        layouts = {name: layout.of(name) for name, _ in model.named_parameters()}
        distribute_parameters(model, stage_mesh(mesh) if has_stages else mesh, layouts)
    if (local := layout.parameters_on(rank())) is not None:
        assert mesh is not None
        keep_stage_parameters(model, local, torch.device(mesh.device_type))


def keep_stage_parameters(model: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Drops the memory of all parameters but those named.

    Parameters keep their identity for optimizers, which leave out the dropped ones.
    """
    _refuse_shared(model)
    dropped = [p for name, p in model.named_parameters() if name not in names]
    kept = [p for name, p in model.named_parameters() if name in names and p.requires_grad]
    with without_weight_references(model):
        # ranks refuse the graphs of a loop that has used a parameter, whoever keeps it
        for parameter in kept:
            swapped = parameter_like(parameter, parameter.detach())
            swapped.grad = parameter.grad
            swap_parameter(parameter, swapped)
        for parameter in dropped:
            if not is_remote(parameter):
                part = local_part(parameter.detach()).to("meta")
                placeholder = in_layout_of(parameter, part)
                swap_parameter(parameter, parameter_like(parameter, placeholder))
            mark_remote(parameter, device)
    leave_out_of_optimizers(dropped)
    for parameter in model.parameters():
        parameter.staged_by_autopar = id(model)  # type: ignore[attr-defined]


def _refuse_shared(model: nn.Module) -> None:
    """Raises StrategyError if stages of another model divide a parameter of this one."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "staged_by_autopar", id(model)) != id(model):
            raise StrategyError(
                f"parameter {name} is part of another compiled model with pipeline stages, which "
                "keep their parameters each. Compile one model that has both, or leave pipelines "
                "out."
            )


def fetch_remote_parameters(
    model: nn.Module, pipeline: Pipeline, group: ProcessGroup, device: torch.device
) -> dict[nn.Parameter, torch.Tensor]:
    """The values of remote parameters, sharded over the mesh of this rank's stage.

    All ranks of the group call this at once.
    """
    found, transfers = {}, []
    with torch.no_grad(), explaining_comm_errors("state_dict"):
        owned = ((name, p) for name, p in model.named_parameters() if name in pipeline.owners)
        for name, parameter in owned:
            part = local_part(parameter.detach())
            if is_remote(parameter):
                part = torch.empty_like(part, device=device)
                found[parameter] = in_layout_of(parameter, part)
            owner = pipeline.rank_of(pipeline.owners[name])
            transfers.append(dist.broadcast(part, group=group, group_src=owner, async_op=True))
        for transfer in transfers:
            transfer.wait()
    return found
