"""Distributes the parameters of a model as DTensors, and the state of their optimizers."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from autopar._torch import (
    HOOK_TABLES,
    pytree,
    without_subclasses,
    without_weight_references,
)
from autopar.core.common.world import world
from autopar.errors import StrategyError
from autopar.runtime.parameters.dtensor_layout import Layout, torch_placements
from autopar.runtime.parameters.optimizers import (
    distribute_states_before_step,
    refuse_stale_optimizers,
)
from autopar.runtime.parameters.sharded import as_sharded, distribute_replicated
from autopar.runtime.parameters.shared_memory import given_memory_of


def check_plain(model: nn.Module) -> None:
    """Raises StrategyError if the model is compiled, distributed or without shapes."""
    if hasattr(model, "_orig_mod"):
        raise StrategyError(
            "this model is compiled already. Give autopar.compile the plain one; it compiles "
            "what it makes with backend='inductor'."
        )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise StrategyError(
                f"parameter {name} has no shape yet: call the plain model once with a batch, "
                "before autopar.compile."
            )
    distributed = isinstance(model, DistributedDataParallel)
    staged = any(hasattr(p, "staged_by_autopar") for p in model.parameters())
    if distributed or staged or any(isinstance(p, DTensor) for p in model.parameters()):
        raise StrategyError(
            "this model is distributed already (by autopar.compile, DDP or fully_shard). Give "
            "autopar.compile the plain one."
        )


def make_contiguous(model: nn.Module) -> None:
    """Makes every parameter and buffer contiguous, as captures and shards assume."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()


def broadcast_from_rank0(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcasts tensors that have values from rank 0, as DDP does parameters and buffers."""
    with torch.no_grad():  # detached, as gloo's threads keep references a little longer
        work = [
            dist.broadcast(local_part(t).detach(), group=world(), group_src=0, async_op=True)
            for t in tensors
            if not t.is_meta
        ]
        for item in work:
            item.wait()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor without gradient, or a plain tensor as it is."""
    with torch.no_grad():  # to_local then skips autograd
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_remote(parameter: torch.Tensor) -> bool:
    """Whether a tensor has only its shape here: on another stage's ranks, or without values."""
    return parameter.is_meta


def as_dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces every parameter by a replicated DTensor, which a plan can later shard in place."""
    placements = [TorchReplicate()] * mesh.ndim
    replicated = {
        id(p): parameter_like(p, as_sharded(DTensor.from_local(p.detach(), mesh, placements)))
        for p in model.parameters()
    }
    for plain in model.parameters():
        _keep_hooks(replicated[id(plain)], _hooks_of(plain))
        if plain.grad is not None:
            gradient = DTensor.from_local(plain.grad.detach(), mesh, placements)
            replicated[id(plain)].grad = as_sharded(gradient)
    refuse_stale_optimizers(replaced := list(model.parameters()))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = replicated[id(parameter)]
    for parameter in replaced:
        if type(parameter) is nn.Parameter:  # a class of the user's may keep other fields
            parameter.__class__ = ReplacedParameter


class ReplacedParameter(nn.Parameter):
    """A parameter that a model no longer has, so that training leaves its values as they were."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        property_of = getattr(getattr(func, "__self__", None), "__name__", None)
        reads = func.__name__ not in _METADATA if property_of is None else property_of in _VALUES
        if reads:
            leaves = pytree.tree_leaves((args, kwargs))
            shape = [*next(x for x in leaves if isinstance(x, cls)).shape]
            raise StrategyError(
                f"a parameter of shape {shape} was taken from the model before autopar.compile, "
                "which replaced it by a sharded one. Take it from the compiled model: "
                "model.parameters() or model.get_parameter(name)."
            )
        with without_subclasses():
            return func(*args, **(kwargs or {}))


_METADATA = frozenset(
    {"__hash__", "__len__", "dim", "is_floating_point", "numel", "size", "stride"}
)
_VALUES = frozenset({"H", "T", "data", "grad", "imag", "mH", "mT", "real"})
"""Properties of a tensor that have values."""


def distribute_parameters(
    model: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Layout]
) -> None:
    """Shards each parameter under its layout.

    DTensors keep their identity for optimizers; plain parameters are replaced in their modules.
    """
    if not all(isinstance(p, DTensor) for p in model.parameters()):
        as_dtensors(model, mesh)
    else:
        distribute_states_before_step(model.parameters())
    with without_weight_references(model):
        for name, parameter in model.named_parameters():
            placements = torch_placements(layouts[name], mesh)
            assert isinstance(parameter, DTensor)
            if parameter.device_mesh != mesh or parameter.placements != placements:
                values = local_part(parameter.detach())
                memory = given_memory_of(parameter, values)
                swapped = parameter_like(parameter, distribute_replicated(values, mesh, placements))
                if parameter.grad is not None:  # of a loop that uses it before the first call
                    gradient = local_part(parameter.grad)
                    swapped.grad = distribute_replicated(gradient, mesh, placements)
                swap_parameter(parameter, swapped)
                if memory is not None:
                    parameter.given_memory = memory  # type: ignore[attr-defined]


def swap_parameter(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Swaps the tensors of two parameters in place; the user's hooks stay."""
    hooks, trains = _hooks_of(parameter), parameter.requires_grad
    if trains:
        _refuse_earlier_graphs(parameter)
    elif parameter.is_floating_point() or parameter.is_complex():
        # torch looks for the accumulator, which `OutsideGradients` holds, of trained tensors alone
        parameter.requires_grad_()
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError:  # an uncollected autograd graph may reference it
        gc.collect()
        try:
            torch.utils.swap_tensors(parameter, other)
        except RuntimeError as error:
            parameter.requires_grad_(trains)
            raise StrategyError(
                f"a parameter of shape {list(parameter.shape)} cannot be sharded in place, since "
                "something refers to it: a view, or a loss that was computed before the first "
                f"call of the model. {_SHARD_ADVICE}"
            ) from error
    _keep_hooks(parameter, hooks)


_SHARD_ADVICE = (
    "Compute it after that call, or give autopar.compile example_inputs, so that parameters are "
    "sharded at once, or a strategy that leaves them whole."
)


def _refuse_earlier_graphs(parameter: nn.Parameter) -> None:
    """Makes a backward through graphs with the tensor that is swapped out raise StrategyError.

    Their gradient would be that tensor's.
    """

    def refuse(*_: Any) -> None:
        raise StrategyError(
            f"a loss reaches a parameter of shape {list(parameter.shape)} through operations "
            "before the first call of the model, which sharded the parameter: its gradient would "
            f"be lost. {_SHARD_ADVICE}"
        )

    accumulator_of(parameter).register_prehook(refuse)


def accumulator_of(parameter: nn.Parameter) -> torch.autograd.graph.Node:
    """The node that adds gradients to a parameter's, once it is trained."""
    trains = parameter.requires_grad
    with torch.enable_grad():  # an alias is made of each rank's part, without communication
        alias = torch.ops.aten.alias(parameter.requires_grad_())
    parameter.requires_grad_(trains)
    assert alias.grad_fn is not None
    node = alias.grad_fn.next_functions[0][0]
    assert node is not None
    return node


def _hooks_of(parameter: nn.Parameter) -> dict[str, Any]:
    return {name: getattr(parameter, name, None) for name in HOOK_TABLES}


def _keep_hooks(parameter: nn.Parameter, hooks: Mapping[str, Any]) -> None:
    for name, table in hooks.items():
        if table:
            setattr(parameter, name, table)  # registers them with autograd


def distribute_like(parameter: torch.Tensor | None, value: Any) -> Any:
    """A value of a state dict in the layout of its parameter.

    All ranks call this, since gathering a sharded value takes all ranks of its mesh. The value of
    a remote parameter is dropped afterwards.
    """
    value = _in_layout_of(parameter, value)
    if parameter is not None and is_remote(parameter) and value.shape == parameter.shape:
        return parameter.detach()
    return value


def _in_layout_of(parameter: torch.Tensor | None, value: Any) -> Any:
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if value.shape != parameter.shape:
        return value
    if isinstance(value, DTensor):
        same_mesh = value.device_mesh == parameter.device_mesh
        if same_mesh and value.placements == parameter.placements:
            return value
        value = value.full_tensor()
    part = local_part(parameter.detach())
    return distribute_replicated(value.to(part), parameter.device_mesh, parameter.placements)


def parameter_like(like: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    """A parameter of these values, trained if `like` is."""
    return nn.Parameter(value, requires_grad=like.requires_grad)
