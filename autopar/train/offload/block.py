"""`StateBlock`: some parameters of a group, whose states lie on a lower level between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar._torch import local_tensor, pytree
from autopar.core.common.block_storage import round_up
from autopar.errors import StrategyError
from autopar.train.offload.state_transfers import Place

ALIGNMENT = 64
"""Bytes at whose multiples a tensor starts inside of its block."""

MASTER = "master"


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@dataclass(eq=False)
class StateBlock:
    """Parameters that are stepped together.

    Attributes:
        parameters: the model's parameters.
        master_dtype: dtype of masters of the parameters; None for none.
        shadows: tensors that the inner optimizer steps. They share the memory of the parameters,
            or are their masters. None before the first step.
        inner: optimizer of the shadows.
        place: place of the states on the lower level; None before the first step.
        layout: shape and dtype of each tensor there.
    """

    parameters: Sequence[nn.Parameter]
    master_dtype: torch.dtype | None = None
    shadows: Sequence[nn.Parameter] = ()
    inner: Optimizer = field(init=False)
    place: Place | None = None
    layout: tuple[tuple[torch.Size, torch.dtype], ...] = ()
    _stored: list[Tensor] = field(default_factory=list)

    @property
    def masters(self) -> bool:
        """Whether the shadows are masters."""
        return self.master_dtype is not None

    def begin(self, make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> None:
        """Makes the shadows and their optimizer, unless they exist."""
        if self.shadows:
            return
        values = [parameter.detach() for parameter in self.parameters]
        if self.master_dtype is not None:
            values = [value.to(self.master_dtype, copy=True) for value in values]
        self.shadows = list(map(nn.Parameter, values))
        self.inner = make(self.shadows)

    def step(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Steps the parameters under a group's hyperparameters; returns them as they are then."""
        for parameter, shadow in zip(self.parameters, self.shadows, strict=True):
            self._refresh(parameter, shadow)
            if parameter.grad is not None:
                shadow.grad = parameter.grad.to(shadow.dtype)
        (group,) = self.inner.param_groups
        group.update(options)
        self.inner.step()
        for parameter, shadow in zip(self.parameters, self.shadows, strict=True):
            shadow.grad = None
            if self.masters:
                local_tensor(parameter).copy_(local_tensor(shadow))
        return hyperparameters(group)

    def _refresh(self, parameter: nn.Parameter, shadow: nn.Parameter) -> None:
        """Follows changes of a parameter since the last step."""
        value, own = local_tensor(parameter), local_tensor(shadow)
        if value.shape != own.shape:
            raise StrategyError(
                f"a parameter of shape {list(parameter.shape)} was sharded after states were "
                "loaded: give compile example_inputs=, or load them after the first call"
            )
        if not self.masters:
            own.data = value.data
        else:
            changed = value != own.to(value.dtype)
            own.copy_(torch.where(changed, value.to(own.dtype), own))

    def load(self, options: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the hyperparameters, the states and the masters by copies of these."""
        copies = [pytree.tree_map(_copy, dict(state)) for state in states]
        for parameter, shadow, state in zip(self.parameters, self.shadows, copies, strict=True):
            master = local_tensor(state.pop(MASTER, parameter))
            if self.masters:
                local_tensor(shadow).data = master.to(shadow.dtype, copy=True)
            else:
                local_tensor(shadow).data = master.data
        indices = list(range(len(copies)))
        kept = {index: state for index, state in enumerate(copies) if state}
        group = {**options, "params": indices}
        self.inner.load_state_dict({"state": kept, "param_groups": [group]})

    def state_of(self, index: int) -> dict[str, Any]:
        """Copies of the states of one parameter, while they are in memory."""
        shadow = self.shadows[index]
        found = pytree.tree_map(_copy, dict(self.inner.state.get(shadow, {})))
        return found | ({MASTER: _copy(shadow)} if self.masters else {})

    def parameters_with_state(self) -> Iterator[nn.Parameter]:
        """The parameters that have a state, or a master."""
        for parameter, shadow in zip(self.parameters, self.shadows, strict=False):
            if self.masters or self.inner.state.get(shadow):
                yield parameter

    @property
    def stored_bytes(self) -> int:
        """Bytes of this block on the lower level."""
        return sum(round_up(_nbytes(*each), ALIGNMENT) for each in self.layout)

    def take_layout(self) -> None:
        """Notes the tensors that leave."""
        self._stored = self._local_states()
        self.layout = tuple((each.shape, each.dtype) for each in self._stored)

    def attach(self, memory: Tensor) -> None:
        """Gives the states their values from memory that was read."""
        for tensor, view in zip(self._stored, self._views(memory), strict=True):
            tensor.data = view.to(tensor.device)

    def detach(self, memory: Tensor) -> None:
        """Copies the states to memory, unless they lie in it, and frees their own."""
        for tensor, view in zip(self._stored, self._views(memory), strict=True):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        self.release()

    def release(self) -> None:
        """Frees the memory of the states."""
        for tensor in self._stored:
            tensor.data = tensor.new_empty(0)

    def _local_states(self) -> list[Tensor]:
        """This rank's masters, and states of more than one number."""
        leaves = pytree.tree_leaves([self.inner.state.get(shadow) for shadow in self.shadows])
        states = [local_tensor(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        masters = [local_tensor(shadow) for shadow in self.shadows] if self.masters else []
        return masters + [each for each in states if each.dim() and each.numel()]

    def _views(self, memory: Tensor) -> Iterator[Tensor]:
        """The states' values in memory, a tensor of bytes."""
        start = 0
        for shape, dtype in self.layout:
            size = _nbytes(shape, dtype)
            yield memory[start : start + size].view(dtype).view(shape)
            start += round_up(size, ALIGNMENT)


def _nbytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
