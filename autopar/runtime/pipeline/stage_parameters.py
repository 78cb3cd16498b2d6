"""What a rank of a pipeline holds: its own stages' parameters, and of the others names and shapes.

A parameter of another rank's stage stays where it is in its module, on the meta device: so calls
are captured, and state dicts have names and shapes, as if all of them were here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import without_weight_references
from autopar.ir.mesh_levels import DATA_AXIS
from autopar.plan.pipeline import Pipeline
from autopar.report.plan import Plan
from autopar.runtime.parameters.distribute import (
    distribute_parameters,
    is_remote,
    local_part,
    swap_parameter,
)
from autopar.runtime.parameters.dtensor_layout import dtensor_from_local
from autopar.runtime.parameters.optimizers import release_from_optimizers
from autopar.runtime.parameters.strided_shard import register_strided_shard_support
from autopar.runtime.process_groups import explaining_comm_errors, rank


def stage_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks among which the parameters of a stage are divided.

    Args:
        mesh: of a plan, whose first axis is pp.
    """
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "pp")
    if names:
        return mesh[names]
    alone = mesh.mesh.view(-1, 1)
    return DeviceMesh(mesh.device_type, alone, mesh_dim_names=("pp", DATA_AXIS))[DATA_AXIS]


def distribute_plan_parameters(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> None:
    """Leaves this rank with its parts of the parameters of its own stages."""
    across = plan.pp_size > 1
    waiting = across and any(isinstance(p, DTensor) for p in model.parameters())
    if mesh is not None and (plan.shards_parameters or waiting):
        if plan.interleaves:
            register_strided_shard_support()
        layouts = {name: plan.layout(name) for name, _ in model.named_parameters()}
        distribute_parameters(model, stage_mesh(mesh) if across else mesh, layouts)
    if across and plan.pipeline is not None:
        keep_stage_parameters(
            model, {*plan.pipeline.held(plan.mesh_coordinate(rank())["pp"]), *plan.changed}
        )


def keep_stage_parameters(model: nn.Module, held: Collection[str]) -> None:
    """Lets go of all parameters but those that are held.

    Both stay what they were to who has them, be it an optimizer: one that is let go has no memory
    and never a gradient, and the optimizer's next step forgets it.
    """
    gone = [p for name, p in model.named_parameters() if name not in held]
    with without_weight_references(model):
        for parameter in gone:
            if not is_remote(parameter):
                swap_parameter(parameter, _placeholder(parameter))
    release_from_optimizers(gone)


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    """Without memory, but with shape and layout."""
    part = local_part(parameter.detach()).to("meta")
    value = _laid_as(parameter, part) if isinstance(parameter, DTensor) else part
    return nn.Parameter(value, requires_grad=parameter.requires_grad)


def fetch_remote_parameters(
    model: nn.Module, pipeline: Pipeline, group: ProcessGroup, device: torch.device
) -> dict[nn.Parameter, torch.Tensor]:
    """The values of parameters that are elsewhere, from the ranks that hold them.

    All ranks of the group call this at once. What is sharded comes as the same shards, laid out
    on this rank's own stage's mesh.
    """
    found, under_way = {}, []
    with torch.no_grad(), explaining_comm_errors("state_dict"):
        owned = ((name, p) for name, p in model.named_parameters() if name in pipeline.owners)
        for name, parameter in owned:
            part = local_part(parameter.detach())
            if is_remote(parameter):
                part = torch.empty_like(part, device=device)
                laid = _laid_as(parameter, part) if isinstance(parameter, DTensor) else part
                found[parameter] = laid
            owner = pipeline.rank_of(pipeline.owners[name])
            work = dist.broadcast(part, group=group, group_src=owner, async_op=True)
            under_way.append(work)
        for work in under_way:
            work.wait()
    return found


def _laid_as(parameter: DTensor, part: torch.Tensor) -> DTensor:
    return dtensor_from_local(part, parameter.device_mesh, parameter.placements, parameter.shape)


def requires_grad_flags(parameters: Iterable[nn.Parameter], *, speaks: bool) -> list[float]:
    """1 for each parameter that is held here and not frozen, if this rank speaks for its stage."""
    return [float(speaks and p.requires_grad and not is_remote(p)) for p in parameters]


def apply_requires_grad_flags(parameters: Iterable[nn.Parameter], flags: Sequence[float]) -> None:
    """Freezes what is elsewhere as the ranks that hold it have; `flags` are the sum of theirs."""
    for parameter, flag in zip(parameters, flags, strict=True):
        if is_remote(parameter) and parameter.requires_grad != bool(flag):
            parameter.requires_grad_(bool(flag))
