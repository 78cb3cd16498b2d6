"""`NamedState`: a model's and its optimizers' state, named as torch.distributed.checkpoint does.

torch finds the names anew at every call, which takes as long as the copy of tens of megabytes. They
are kept here, once they have been found to lead to the same values as torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim import Optimizer

from autopar._torch import local_tensor

# A flat optimizer state suits every plan: ranks of a pipeline have different parameters.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

States = tuple[dict[str, Any], dict[str, Any]]
"""State of the model and of the optimizers, by name."""


class NamedState:
    """The state of a model and its optimizers, without copies."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._parameters: list[list[Tensor]] = []  # by optimizer
        self._names: dict[int, str] = {}  # by `id` of a parameter in `_parameters`
        self._known: States | None = None

    def now(self) -> States:
        """The state of this moment, as torch's `get_state_dict` gives it."""
        if self._known is not None and self._has_same_parameters():
            own = self._by_names()
            if all(a.keys() == b.keys() for a, b in zip(own, self._known, strict=True)):
                return own
        wanted = get_state_dict(self._model, self._optimizers, options=OPTIONS)
        self._known = _keys_of(wanted) if self._finds_same(wanted) else None
        return wanted

    def _finds_same(self, wanted: States) -> bool:
        """Notes the names of parameters; whether they lead to the same values as torch's."""
        self._parameters = [_parameters_of(each) for each in self._optimizers]
        self._names = {id(each): name for name, each in self._model.named_parameters()}
        if not all(id(each) in self._names for each in chain(*self._parameters)):
            return False
        return all(_is_same(*each) for each in zip(self._by_names(), wanted, strict=True))

    def _has_same_parameters(self) -> bool:
        now = [_parameters_of(each) for each in self._optimizers]
        return [list(map(id, each)) for each in now] == [
            list(map(id, each)) for each in self._parameters
        ]

    def _by_names(self) -> States:
        moments: dict[str, Any] = {}
        for optimizer, parameters in zip(self._optimizers, self._parameters, strict=True):
            packed = optimizer.state_dict()
            names = [self._names[id(each)] for each in parameters]
            for index, state in packed["state"].items():
                _flatten(state, f"state.{names[index]}", moments)
            for group in packed["param_groups"]:
                for index in group["params"]:
                    rest = {key: value for key, value in group.items() if key != "params"}
                    moments |= {f"param_groups.{names[index]}.{k}": v for k, v in rest.items()}
        return self._model.state_dict(), moments


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _flatten(state: Mapping[Any, Any], prefix: str, into: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}.{key}", into)
        else:
            into[f"{prefix}.{key}"] = value


def _keys_of(states: States) -> States:
    """The names alone, which keep no tensor alive."""
    weights, moments = (dict.fromkeys(each) for each in states)
    return weights, moments


def _is_same(own: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return own.keys() == wanted.keys() and all(_are_one(own[key], wanted[key]) for key in own)


def _are_one(a: Any, b: Any) -> bool:
    """Whether two values are the same place in memory, or equal where they are no tensors."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float)) and a == b)
    own, other = local_tensor(a), local_tensor(b)
    return own.data_ptr() == other.data_ptr() and a.shape == b.shape and own.dtype == other.dtype
