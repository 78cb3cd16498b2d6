"""State of an optimizer by parameter names: gathered from all ranks, or spread over them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate

from autopar._torch import pytree
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank, run_on_all_ranks
from autopar.runtime.parameters.distribute import distribute_like, is_remote
from autopar.runtime.parameters.dtensor_layout import is_sharded
from autopar.runtime.parameters.optimizers import adapt_optimizer
from autopar.runtime.parameters.sharded import distribute_replicated
from autopar.runtime.parameters.strided_shard import whole_tensor
from autopar.runtime.process_groups import explaining_comm_errors
from autopar.runtime.states.checksum import checksum


class TensorAt(NamedTuple):
    """Place of a tensor among those that a rank sends, with its shape and dtype."""

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def full_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    stages: dist.ProcessGroup | None,
    device: torch.device,
) -> dict[str, Any]:
    """The state of an optimizer as whole tensors on the CPU; `stages` is the pipeline's group."""
    names = run_on_all_ranks(lambda: _names_of(model, optimizer))
    read: Callable[[], Mapping[Any, Any]] = getattr(optimizer, "read_states", optimizer.state.copy)
    states = read()  # an OffloadedOptimizer has them on storage
    named = {name: states[p] for p, name in names.items() if p in states}
    _check_equal_copies({name: p for p, name in names.items()}, named)
    with torch.no_grad(), explaining_comm_errors("full_optimizer_state_dict"):
        state = pytree.tree_map(_whole, named)
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            | {"params": [names[p] for p in group["params"] if p in names]}
            for group in optimizer.param_groups
        ]
        if stages is not None:
            state, groups = _of_all_stages(state, groups, stages, device)
    shared = {key: x for key, x in states.items() if not isinstance(key, torch.Tensor)}
    return {"state": {**state, **shared}, "param_groups": groups}


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
) -> None:
    """Loads a whole state into this rank's part of an optimizer."""
    names, groups = _names_of(model, optimizer), full["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise StrategyError(
            f"the optimizer has {len(optimizer.param_groups)} groups of parameters, and the state "
            f"to load has {len(groups)}. Make it with the same groups."
        )
    state = {key: x for key, x in full["state"].items() if key not in set(_all_names(model))}
    places: list[dict[str, Any]] = []
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        indices: list[int] = []
        for parameter in own["params"]:
            name, index = names.get(parameter), len(indices) + sum(len(g["params"]) for g in places)
            if name is not None and name not in saved["params"]:
                raise StrategyError(
                    f"parameter {name} is not in the same group of the state to load. Make the "
                    "optimizer with the same groups."
                )
            if name in full["state"]:
                state[index] = _placed(parameter, full["state"][name])
            indices.append(index)
        places.append({**saved, "params": indices})
    optimizer.load_state_dict({"state": state, "param_groups": places})


def _names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """The first name of each parameter of an optimizer that this rank holds."""
    adapt_optimizer(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = {}
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        name = names.get(parameter, getattr(parameter, "name_in_model", None))
        if name is None:
            raise StrategyError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not one "
                "of this model. Make it from model.parameters() of what autopar.compile returns."
            )
        if not is_remote(parameter):
            found[parameter] = name
    return found


def _all_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _check_equal_copies(
    parameters: Mapping[str, nn.Parameter], state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raises StrategyError on every rank if an unsharded state of a shard differs between ranks."""
    if not is_multi_rank():
        return
    own: dict[str, int] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) and any(map(is_sharded, parameter.placements)):
            for key, value in state.get(name, {}).items():
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                        own[f"{key} of {name}"] = checksum(leaf, own.get(f"{key} of {name}", 0))
    gathered: list[dict[str, int]] = gather_objects(own)
    every = ChainMap(*gathered)
    odd = [key for key in every if len({each[key] for each in gathered if key in each}) > 1]
    if odd:
        raise StrategyError(
            f"the optimizer keeps {odd[0]} for this rank's shard alone ({len(odd)} such tensors), "
            "so that it has no whole state to save. Save optimizer.state_dict() on each rank."
        )


def _whole(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return whole_tensor(value).detach().to("cpu", copy=True)


def _placed(parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """A whole state in the layout of its parameter; the counts of steps stay plain tensors."""
    return {
        key: pytree.tree_map(partial(_placed_tensor, parameter, key == "step"), value)
        for key, value in state.items()
    }


def _placed_tensor(parameter: nn.Parameter, is_count: bool, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(parameter, DTensor) or is_count:
        return value.clone()
    if value.shape == parameter.shape:
        return distribute_like(parameter, value)
    if not value.dim():
        return value.clone()
    mesh = parameter.device_mesh
    return distribute_replicated(value.to(parameter.device), mesh, [TorchReplicate()] * mesh.ndim)


def _of_all_stages(
    state: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    stages: dist.ProcessGroup,
    device: torch.device,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The states and groups of all stages; each stage sends its tensors to the others."""
    leaves, structure = pytree.tree_flatten(state)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    places = iter(range(len(tensors)))
    sent = [
        TensorAt(next(places), tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ]
    gathered = gather_objects((pytree.tree_unflatten(sent, structure), groups))
    found: dict[str, Any] = {}
    merged: list[dict[str, Any]] = [{**group, "params": []} for group in groups]
    for source, global_rank in enumerate(dist.get_process_group_ranks(stages)):
        described, of_stage = gathered[global_rank]
        received: dict[int, torch.Tensor] = {}
        for leaf in pytree.tree_leaves(described, is_leaf=_is_place):
            if _is_place(leaf):
                part = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
                if source == dist.get_rank(stages):
                    part.copy_(tensors[leaf.place])
                dist.broadcast(part, group=stages, group_src=source)
                received[leaf.place] = part.cpu()
        filled = pytree.tree_map(partial(_received, received), described, is_leaf=_is_place)
        found |= {name: value for name, value in filled.items() if name not in found}
        for group, more in zip(merged, of_stage, strict=True):
            group["params"] += [name for name in more["params"] if name not in group["params"]]
    return found, merged


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, TensorAt)


def _received(tensors: Mapping[int, torch.Tensor], leaf: Any) -> Any:
    return tensors[leaf.place] if _is_place(leaf) else leaf
