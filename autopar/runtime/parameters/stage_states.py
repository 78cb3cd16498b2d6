"""`StageStates`: an optimizer's state, without that of parameters of other pipeline stages.

A loop that goes through it, or saves it, would take a part for the whole, and is told.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import FrameType
from typing import Any

from torch.optim import Optimizer

from autopar.common.notices import warn_once
from autopar.errors import AutoparWarning, NumericsWarning, StrategyError
from autopar.runtime.parameters.remote import is_on_other_stage

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
    while frame is not None and _module_of(frame).startswith(("torch.optim.", "torch._")):
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


def _module_of(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


def _is_library(frame: FrameType) -> bool:
    return _module_of(frame).startswith(_LIBRARIES)


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
