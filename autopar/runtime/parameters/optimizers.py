"""Optimizers of a model whose parameters a plan has sharded, replaced or left to other stages.

Those of torch keep parameters of other stages and leave them out of steps, since they find no
gradients of them. So a loop that clips `optimizer.param_groups` hears that it misses values. Other
optimizers get the parameters of their rank's stages alone, and a warning.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.core.common.notices import warn_once
from autopar.errors import AutoparWarning, NumericsWarning, StrategyError
from autopar.runtime.parameters.remote import is_on_other_stage, module_of
from autopar.runtime.parameters.sharded import distribute_replicated

_SEEN: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that have stepped."""

_AWAITING_LAYOUT: set[int] = set()
"""`id` of parameters whose optimizer state must be distributed."""


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(adapt_optimizer)


def adapt_optimizer(optimizer: Optimizer, *_: Any) -> None:
    """Raises for replaced parameters, leaves out those of other stages and distributes state."""
    if optimizer in _SEEN and not _AWAITING_LAYOUT:
        return
    _SEEN.add(optimizer)
    _leave_out_remote(optimizer)
    for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
        if getattr(parameter, "replaced_by_autopar", False):
            raise StrategyError(
                "this optimizer was made before autopar.compile, which has replaced the "
                "parameters since: it would train none. Make it afterwards, from "
                "model.parameters() of what autopar.compile returns."
            )
        if isinstance(parameter, DTensor) and id(parameter) in _AWAITING_LAYOUT:
            _AWAITING_LAYOUT.discard(id(parameter))
            state = optimizer.state.get(parameter, {})
            state |= {key: _distributed_as(parameter, value) for key, value in state.items()}


def distribute_states_before_step(parameters: Iterable[nn.Parameter]) -> None:
    """Distributes optimizer state like its parameter before the next step.

    A checkpoint loaded before the plan exists brings unsharded state.
    """
    _AWAITING_LAYOUT.update(id(p) for p in parameters if p.requires_grad)
    _register()


def refuse_stale_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Makes optimizers of replaced parameters raise, since they would train nothing."""
    for parameter in parameters:
        parameter.replaced_by_autopar = True  # type: ignore[attr-defined]
    _register()


def leave_out_of_optimizers(parameters: Iterable[nn.Parameter]) -> None:
    """Makes optimizers leave out parameters of other stages, from the next step on."""
    for parameter in parameters:
        _AWAITING_LAYOUT.discard(id(parameter))
    _SEEN.clear()
    _register()
    _leave_out_of_new_optimizers()


def left_out_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of other stages that were given to an optimizer, and that it dropped."""
    left_out: list[torch.Tensor] = vars(optimizer).setdefault("left_out_by_autopar", [])
    return left_out


def _keeps_all(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step reads gradients in modules of torch alone, which find none."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


@functools.cache
def _leave_out_of_new_optimizers() -> None:
    add, zero = Optimizer.add_param_group, Optimizer.zero_grad

    @functools.wraps(add)
    def add_own(self: Optimizer, param_group: dict[str, Any]) -> None:
        params = param_group["params"]
        if isinstance(params, set):
            return add(self, param_group)  # torch's error
        entries = [params] if isinstance(params, torch.Tensor) else list(params)
        param_group["params"] = entries  # a generator, such as layer.parameters(), is read once
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        pairs = zip(entries, tensors, strict=True)
        local_entries = [entry for entry, tensor in pairs if not is_on_other_stage(tensor)]
        if len(local_entries) == len(entries):
            return add(self, param_group)
        if _keeps_all(self):
            keep_stage_states(self)
            return add(self, {**param_group, "params": entries})
        _warn_of_parts(self)
        left_out_of(self).extend(x for x in tensors if is_on_other_stage(x))
        return add(self, {**param_group, "params": local_entries or entries})

    @functools.wraps(zero)
    def zero_all(self: Optimizer, set_to_none: bool = True) -> None:
        zero(self, set_to_none)
        for parameter in left_out_of(self) if set_to_none else ():
            parameter.grad = None

    Optimizer.add_param_group = add_own  # type: ignore[method-assign]
    Optimizer.zero_grad = zero_all  # type: ignore[method-assign]


def _leave_out_remote(optimizer: Optimizer) -> None:
    """Drops states of parameters of other stages, and the parameters where a step reads them."""
    remote = [p for g in optimizer.param_groups for p in g["params"] if is_on_other_stage(p)]
    for parameter in remote:
        optimizer.state.pop(parameter, None)
    if not remote:
        return
    if _keeps_all(optimizer):
        keep_stage_states(optimizer)
        return
    _warn_of_parts(optimizer)
    left_out = left_out_of(optimizer)
    left_out += [p for p in remote if not any(p is other for other in left_out)]
    kept = list(getattr(optimizer, "kept_by_autopar", ()))
    for number, group in enumerate(optimizer.param_groups):
        count = len(group["params"])
        if number == len(kept):
            kept.append((count, tuple(range(count))))
        size, places = kept[number] if len(kept[number][1]) == count else (count, range(count))
        pairs = zip(places, group["params"], strict=True)
        remaining = [(place, p) for place, p in pairs if not is_on_other_stage(p)]
        group["params"] = [parameter for _, parameter in remaining]
        kept[number] = size, tuple(place for place, _ in remaining)
    if not hasattr(optimizer, "kept_by_autopar"):
        optimizer.register_load_state_dict_pre_hook(_select_kept)
    optimizer.kept_by_autopar = kept  # type: ignore[attr-defined]


def _warn_of_parts(optimizer: Optimizer) -> None:
    warn_once(
        NumericsWarning,
        f"{type(optimizer).__name__} has the parameters of this rank's stage alone. If it, or a "
        "loop over its param_groups, computes something of several of them, such as a norm of all "
        "gradients, or draws random numbers for each, the result is not that of one device: make "
        "it by model.whole_optimizer().",
    )


def _select_kept(optimizer: Any, state: dict[str, Any]) -> dict[str, Any] | None:
    """The part of a whole model's state that an optimizer keeps parameters of."""
    groups, kept = state["param_groups"], optimizer.kept_by_autopar
    if [len(group["params"]) for group in groups] != [size for size, _ in kept]:
        return None
    selected = [
        {**group, "params": [group["params"][place] for place in places]}
        for group, (_, places) in zip(groups, kept, strict=True)
    ]
    dropped = {key for group in groups for key in group["params"]}
    dropped -= {key for group in selected for key in group["params"]}
    values = {key: value for key, value in state["state"].items() if key not in dropped}
    return {**state, "state": values, "param_groups": selected}


def _distributed_as(parameter: DTensor, value: Any) -> Any:
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_replicated(value.full_tensor(), parameter.device_mesh, parameter.placements)


# States, of which a loop would take a part for the whole.

_LIBRARIES = ("torch.", "autopar.", "copy.")
"""Modules that know of partial states, or copy them."""

_ADVICE = (
    "Read states of all stages by model.full_optimizer_state_dict(optimizer), or leave pipelines "
    "out."
)


def _checked(name: str) -> Any:
    """A method of dictionaries that reads the state of a parameter."""
    read = getattr(defaultdict, name)

    def method(self: StageStates, parameter: Any, *default: Any) -> Any:
        _check(parameter, sys._getframe(1))
        return read(self, parameter, *default)

    return method


def _told(name: str) -> Any:
    """A method of dictionaries that reads all states."""
    read = getattr(defaultdict, name)

    def method(self: StageStates) -> Any:
        _warn(sys._getframe(1))
        return read(self)

    return method


class StageStates(defaultdict[Any, Any]):
    """The state of an optimizer by parameter."""

    __contains__, __getitem__, get = map(_checked, ("__contains__", "__getitem__", "get"))
    __iter__, __len__, items = map(_told, ("__iter__", "__len__", "items"))
    keys, values = map(_told, ("keys", "values"))


def keep_stage_states(optimizer: Optimizer) -> None:
    """Makes an optimizer give and take states of this rank's stages alone, from now on."""
    if not isinstance(optimizer.state, StageStates):
        optimizer.state = StageStates(dict, optimizer.state)
    if not hasattr(optimizer, "states_hooked_by_autopar"):
        optimizer.states_hooked_by_autopar = True  # type: ignore[attr-defined]
        optimizer.register_state_dict_post_hook(_saved)
        optimizer.register_load_state_dict_pre_hook(_without_remote_states)
        optimizer.register_load_state_dict_post_hook(keep_stage_states)


def _saved(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_of(frame).startswith(("torch.optim.", "torch._")):
        frame = frame.f_back
    if frame is not None and not _is_library(frame):
        warn_once(
            AutoparWarning,
            "optimizer.state_dict() has the states of this rank's stages alone, with the numbers "
            "of one device. Save and load it on every rank, or use "
            "model.full_optimizer_state_dict(optimizer).",
        )
    return _without_remote_states(optimizer, state)


def _without_remote_states(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """A state dict without states of other stages' parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state["param_groups"] for key in group["params"]]
    if len(keys) != len(parameters):
        return None
    remote = {key for key, p in zip(keys, parameters, strict=True) if is_on_other_stage(p)}
    return {**state, "state": {k: v for k, v in state["state"].items() if k not in remote}}


def _is_library(frame: FrameType) -> bool:
    return module_of(frame).startswith(_LIBRARIES)


def _check(parameter: Any, frame: FrameType) -> None:
    if is_on_other_stage(parameter) and not _is_library(frame):
        raise StrategyError(
            f"the optimizer's state of a parameter of shape {list(parameter.shape)} is read, "
            f"which lives on another stage of the pipeline. {_ADVICE}"
        )


def _warn(frame: FrameType) -> None:
    if not _is_library(frame):
        warn_once(
            NumericsWarning,
            "optimizer.state has the states of this rank's stages alone: what a loop makes of all "
            f"of them is not that of one device. {_ADVICE}",
        )
