"""Parameters as a plan lays them out: plain tensors where whole, DTensors where sharded."""

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

from autopar._torch import without_weight_references
from autopar.errors import StrategyError
from autopar.graph import ParameterInfo
from autopar.provenance import block_of
from autopar.runtime.layout import Layout, laid_out, torch_placements
from autopar.runtime.optimizers import expect_states, refuse_optimizers_of


def check_plain(model: nn.Module) -> None:
    """Raises StrategyError if the model is compiled or distributed already."""
    if hasattr(model, "_orig_mod"):
        raise StrategyError(
            "this model is compiled already. Give autopar.compile the plain one; it compiles "
            "what it makes with backend='inductor'."
        )
    distributed = isinstance(model, DistributedDataParallel)
    if distributed or any(isinstance(p, DTensor) for p in model.parameters()):
        raise StrategyError(
            "this model is distributed already (by autopar.compile, DDP or fully_shard). Give "
            "autopar.compile the plain one."
        )


def describe_parameters(model: nn.Module) -> dict[str, ParameterInfo]:
    """Name, whole shape and block of every parameter, tied ones once."""
    blocks = find_blocks(model)
    return {
        name: ParameterInfo(name, tuple(p.shape), p.dtype, p.requires_grad, blocks[name])
        for name, p in model.named_parameters()
    }


def describe_buffers(model: nn.Module) -> str:
    """Name, shape and dtype of every buffer, as text to compare."""
    return str([(name, tuple(b.shape), b.dtype) for name, b in model.named_buffers()])


def find_blocks(model: nn.Module) -> dict[str, str]:
    """The block of every parameter name: the repeated layer that holds it, "" for the rest.

    The blocks are the elements of the outermost ModuleLists, ModuleDicts and Sequentials.
    """
    blocks = [""]
    containers = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        inside = any(block and name.startswith(block + ".") for block in blocks)
        is_element = bool(name) and isinstance(model.get_submodule(parent), containers)
        if is_element and not inside and not isinstance(module, containers):
            blocks.append(name)
    found = {}
    for name, _ in model.named_parameters():
        found[name] = block_of(name.rpartition(".")[0], blocks[1:])
    return found


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters; for meta ones, where they will be."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.device.type != "meta":
            return tensor.device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def materialize(model: nn.Module, device: torch.device) -> None:
    """Gives storage and first values to parameters on the meta device.

    Raises:
        StrategyError: a module with such parameters has no `reset_parameters`.
    """
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(t.device.type == "meta" for t in own):
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise StrategyError(
                f"{name or type(model).__name__} has parameters on the meta device and no "
                "reset_parameters() to give them values. Define one, or call model.to_empty() "
                "and load values before autopar.compile."
            )
        module.to_empty(device=device, recurse=False)
        reset()


def make_contiguous(model: nn.Module) -> None:
    """Gives every parameter and buffer the plain layout that captures and shards assume."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()


def broadcast_state(model: nn.Module) -> None:
    """Gives every rank the parameters and buffers of rank 0, as DDP does.

    Detached, for gloo's threads hold what was sent a moment longer than `wait`, and torch swaps no
    tensor that others hold.
    """
    with torch.no_grad():
        work = [
            dist.broadcast(local(t).detach(), src=0, async_op=True)
            for t in [*model.parameters(), *model.buffers()]
        ]
        for item in work:
            item.wait()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor; of a DTensor, without a gradient."""
    with torch.no_grad():  # where DTensor hands it out without more ado
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_elsewhere(parameter: torch.Tensor) -> bool:
    """Whether another rank of a pipeline holds a parameter, and this one its shape."""
    return parameter.device.type == "meta"


def as_dtensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Turns every parameter into a replicated DTensor, which can later be swapped for a shard."""
    whole = [TorchReplicate()] * mesh.ndim
    replicated = {
        id(p): _parameter(p, DTensor.from_local(p.detach(), mesh, whole))
        for p in model.parameters()
    }
    for plain in model.parameters():
        _keep_hooks(replicated[id(plain)], _hooks_of(plain))
    refuse_optimizers_of(model.parameters())
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = replicated[id(parameter)]


def lay_out(model: nn.Module, mesh: DeviceMesh, layouts: Mapping[str, Layout]) -> None:
    """Swaps each parameter, in place, for its part under `layouts`.

    Parameters that are DTensors keep their identity, so that an optimizer made before holds the
    right ones; plain ones are replaced in their modules.
    """
    if not all(isinstance(p, DTensor) for p in model.parameters()):
        as_dtensors(model, mesh)
    else:
        expect_states(model.parameters())
    with without_weight_references(model):
        for name, parameter in model.named_parameters():
            placements = torch_placements(layouts[name], mesh)
            assert isinstance(parameter, DTensor)
            if parameter.device_mesh != mesh or parameter.placements != placements:
                part = laid_out(local(parameter.detach()), mesh, placements)
                swap(parameter, _parameter(parameter, part))


def swap(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Swaps tensors in place; the user's hooks stay."""
    hooks = _hooks_of(parameter)
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError:  # an old graph, not collected yet, still has hands on it
        gc.collect()
        try:
            torch.utils.swap_tensors(parameter, other)
        except RuntimeError as error:
            raise StrategyError(
                "a parameter cannot be sharded in place, since something keeps a weak reference to "
                "it, as recurrent layers do. Give autopar.compile example_inputs, or a strategy "
                "that leaves parameters whole."
            ) from error
    _keep_hooks(parameter, hooks)


def _hooks_of(parameter: nn.Parameter) -> dict[str, Any]:
    return {name: getattr(parameter, name, None) for name in HOOKS}


def _keep_hooks(parameter: nn.Parameter, hooks: Mapping[str, Any]) -> None:
    for name, table in hooks.items():
        if table:
            setattr(parameter, name, table)  # tells autograd of them


HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def laid_out_as(parameter: torch.Tensor | None, value: Any) -> Any:
    """A value of a state dict, whole or not, as its parameter lies.

    Of a parameter that is elsewhere it is let go, but only here: to make a sharded value whole
    takes all ranks of its mesh.
    """
    laid = _laid_out_as(parameter, value)
    if parameter is not None and is_elsewhere(parameter) and laid.shape == parameter.shape:
        return parameter.detach()
    return laid


def _laid_out_as(parameter: torch.Tensor | None, value: Any) -> Any:
    if not isinstance(parameter, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if value.shape != parameter.shape:
        return value
    if isinstance(value, DTensor):
        alike = value.device_mesh == parameter.device_mesh
        if alike and value.placements == parameter.placements:
            return value
        value = value.full_tensor()
    part = local(parameter.detach())
    return laid_out(value.to(part), parameter.device_mesh, parameter.placements)


def _parameter(like: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=like.requires_grad)


def find_separate_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that share no parameter with the rest of the model, as modules.

    Sharded block by block, a parameter that two of them share would come untied.
    """
    blocks = [name for name in dict.fromkeys(find_blocks(model).values()) if name]
    holders: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, set()).add(block_of(name.rpartition(".")[0], blocks))
    sharing = set().union(*(names for names in holders.values() if len(names) > 1))
    return [model.get_submodule(name) for name in blocks if name not in sharing]


def total_bytes(parameters: Iterable[ParameterInfo]) -> int:
    """Bytes of whole parameters."""
    return sum(p.bytes for p in parameters)
