"""Names, shapes, blocks and devices of a model's parameters and buffers."""

from __future__ import annotations

import os
from itertools import chain

import torch
from torch import distributed as dist
from torch import nn

from autopar.capture.provenance import block_of
from autopar.core.ir.graph import ParameterInfo
from autopar.errors import ModelError, StrategyError


def describe_parameters(model: nn.Module) -> dict[str, ParameterInfo]:
    """Every parameter by name, with its global shape and block; tied parameters appear once.

    Raises:
        ModelError: a name is not Unicode text, which no file can hold.
    """
    for name in chain(dict(model.named_parameters()), dict(model.named_buffers())):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"the name of the parameter or buffer {name} is not Unicode text: rename it"
            ) from error
    blocks = find_blocks(model)
    return {
        name: ParameterInfo(name, tuple(p.shape), p.dtype, p.requires_grad, blocks[name])
        for name, p in model.named_parameters()
    }


def find_blocks(model: nn.Module) -> dict[str, str]:
    """The repeated block of every parameter, by name; "" outside of blocks.

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
    names = (name for name, _ in model.named_parameters())
    return {name: block_of(name.rpartition(".")[0], blocks[1:]) for name in names}


def device_of(model: nn.Module, wanted: str | torch.device | None = None) -> torch.device:
    """The device of a run: the one wanted, else that of the parameters.

    Meta models run on this process's GPU, or on the CPU if a running process group has gloo alone.

    Raises:
        StrategyError: it is to be a GPU, and this process has none.
    """
    if wanted is not None and torch.device(wanted).type == "cuda" and not torch.cuda.is_available():
        raise StrategyError(
            f"device={str(wanted)!r}, but torch finds no GPU: leave device out to train on the CPU"
        )
    tensors: list[torch.Tensor] = [*model.parameters()]
    tensors = tensors or [*model.buffers()]
    real = (tensor.device for tensor in tensors if tensor.device.type != "meta")
    device = torch.device(wanted) if wanted is not None else next(real, None)
    if device is None:
        has_group = dist.is_available() and dist.is_initialized()
        on_cpu = has_group and str(dist.get_backend()) == "gloo"
        return torch.device("cpu") if on_cpu else default_device()
    if device.type == "cuda" and device.index is None:
        return default_device()
    return torch.device("cpu") if device.type == "cpu" else device  # tensors have no "cpu:0"


def default_device() -> torch.device:
    """The GPU that the user has set, or that of torchrun's LOCAL_RANK; the CPU without GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    current = torch.cuda.current_device()
    # Device 0 is also torch's default, so it does not count as set. Where each process sees
    # one GPU of its node, LOCAL_RANK may exceed the visible devices.
    is_set = current != 0 or local_rank >= torch.cuda.device_count()
    return torch.device("cuda", current if is_set else local_rank)


def find_separate_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of repeated blocks that share no parameter with other modules.

    Sharding block by block would untie a parameter that two of them share.
    """
    blocks = [name for name in dict.fromkeys(find_blocks(model).values()) if name]
    holders: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, set()).add(block_of(name.rpartition(".")[0], blocks))
    sharing = set().union(*(names for names in holders.values() if len(names) > 1))
    return [model.get_submodule(name) for name in blocks if name not in sharing]
