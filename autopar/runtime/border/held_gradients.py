"""`HeldGradients`: gradients of calls inside `no_sync`, held back until the next call outside.

Each is its parameter's `.grad` meanwhile, as under DistributedDataParallel. So it is discarded as
any gradient is: by `zero_grad` of a model or an optimizer, or by `p.grad = None`. It has no value
of all ranks yet: where one is read, or stepped by, all ranks reduce all of them. So an epoch may
end in a window that is cut short. Under plans that reduce in other ways it is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from autopar._torch import empty_subclass, pytree
from autopar.core.ir.mesh_levels import DATA_AXIS, DATA_STORAGE_AXES
from autopar.core.plan.plan import Plan
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import assert_same_across_ranks
from autopar.runtime.border.closures import after_gradients
from autopar.runtime.parameters.sharded import ShardedTensor, in_layout_of

aten = torch.ops.aten


@dataclass
class _Held:
    """The gradient of a parameter while a part of it is held back.

    Attributes:
        own: sum of this rank's gradients of calls inside `no_sync`, None once discarded or reduced.
        reduced: the gradient of all ranks from other calls and losses, if any.
        holder: holds it back, beside others.
    """

    parameter: nn.Parameter
    own: torch.Tensor | None
    reduced: torch.Tensor | None
    holder: HeldGradients

    @property
    def is_current(self) -> bool:
        return self.own is not None and getattr(self.parameter.grad, "_held", None) is self

    def read(self) -> torch.Tensor:
        if self.own is not None:
            self.holder.reduce()
        assert self.reduced is not None
        return self.reduced

    def settle(self) -> None:
        """Adds the held part to the gradient that a loop kept from before.

        Raises:
            StrategyError: `.grad` is another one since.
        """
        if not self.is_current:
            raise StrategyError(
                "a gradient from before no_sync() is used, of which a part was held back when "
                "the parameter's grad was replaced. Read it before, or replace it outside."
            )
        self.holder.reduce()

    def discard(self) -> None:
        """Makes the gradient zeros."""
        self.own = None
        if self.reduced is None:
            self.reduced = torch.zeros_like(self.parameter.detach())
        else:  # a loop may have kept it
            _settle(self.reduced).zero_()
        if getattr(self.parameter.grad, "_held", None) is self:
            self.parameter.grad = self.reduced

    def add(self, gradient: torch.Tensor) -> None:
        """Adds what autograd accumulates beside calls of the model."""
        if self.reduced is not None:
            # A kept gradient reduces on every use, so it is plain during this addition.
            _settle(self.reduced).add_(gradient)
            _unsettle(self)
        else:
            self.reduced = gradient.detach().clone()


class HeldGradient(torch.Tensor):
    """The `.grad` of a parameter whose gradient is held back: to discard, or to reduce and read."""

    _held: _Held

    @staticmethod
    def __new__(cls, held: _Held) -> HeldGradient:
        like = held.parameter
        made = empty_subclass(cls, tuple(like.shape), tuple(like.stride()), like)
        made._held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # An alias reads nothing, so that `grad.data.zero_()` discards the gradient unreduced.
        if func in (aten.detach.default, aten.alias.default):
            return HeldGradient(args[0]._held)
        if func in (aten.zero_.default, aten._foreach_zero_.default):
            pytree.tree_map_only(torch.Tensor, _zero, args[0])
            return args[0]
        if func is aten.add_.Tensor and not kwargs and _are_alike(*args):  # by autograd
            args[0]._held.add(_read(args[1]))
            return args[0]
        return func(*pytree.tree_map(_read, tuple(args)), **pytree.tree_map(_read, kwargs or {}))

    @property
    def reduced(self) -> torch.Tensor | None:
        """The gradient of all ranks, to which the part that is held back will be added."""
        return self._held.reduced

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HeldGradient(shape={list(self.shape)}, until a call outside of no_sync())"


def _unsettle(held: _Held) -> None:
    """Lets a gradient that a loop kept from before tell where it is used.

    On one device it still is the parameter's `.grad`, to which the held part was added.
    """
    kept = held.reduced
    if kept is not None and type(kept) in (torch.Tensor, ShardedTensor):
        kept.__class__ = _KEPT[type(kept)]
        kept._held = held  # type: ignore[attr-defined]


def _settle(kept: torch.Tensor) -> torch.Tensor:
    """The gradient as a plain one again."""
    if isinstance(kept, _Kept):
        del kept._held
        kept.__class__ = type(kept).plain  # type: ignore[assignment]
    return kept


class _Kept:
    """A gradient from before `no_sync`, while a part to add to it is held back."""

    plain: type[torch.Tensor]
    _held: _Held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, _Kept):
                leaf._held.settle()
        return func(*args, **(kwargs or {}))


class _KeptTensor(_Kept, torch.Tensor):
    plain = torch.Tensor


class _KeptShard(_Kept, ShardedTensor):
    plain = ShardedTensor


_KEPT = {kind.plain: kind for kind in (_KeptTensor, _KeptShard)}


def _are_alike(one: Any, other: Any) -> bool:
    """Whether a gradient that is held back and another tensor have one shape."""
    is_held = isinstance(one, HeldGradient) and isinstance(other, torch.Tensor)
    return is_held and one.shape == other.shape


def _zero(gradient: torch.Tensor) -> None:
    if isinstance(gradient, HeldGradient):
        gradient._held.discard()
    else:
        gradient.zero_()


def _read(value: Any) -> Any:
    return value._held.read() if isinstance(value, HeldGradient) else value


@dataclass
class HeldGradients:
    """The gradients that this rank holds back, by name of the parameter.

    Attributes:
        mesh: the ranks of the plan; None where only a call reduces gradients.
    """

    mesh: DeviceMesh | None = None
    _held: dict[str, _Held] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters with gradients that were not discarded, sorted."""
        return tuple(sorted(name for name, held in self._held.items() if held.is_current))

    def add(self, name: str, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds to a gradient that is held back."""
        held = self._held.get(name)
        if held is not None and held.is_current:
            assert held.own is not None
            held.own += gradient
            return
        _reduce_before_steps()
        # programs expect these strides
        self._held[name] = made = _Held(parameter, gradient.contiguous(), parameter.grad, self)
        parameter.grad = HeldGradient(made)
        # A change of the older gradient would miss the part that is held back from now on.
        _unsettle(made)

    def reduce(self) -> None:
        """Makes all of them gradients of all ranks; every rank does so at once.

        Raises:
            StrategyError: the plan does not sum gradients as they are.
            DisagreementError: ranks hold back others, or another rank does something else.
        """
        if self.mesh is None:
            raise StrategyError(
                "a gradient is read or stepped by, of which each rank holds back its own part: "
                "its last backward ran inside of no_sync(). Make the last call of a window outside "
                "of no_sync(), which adds and reduces what is held back, or discard it by "
                "zero_grad()."
            )
        names = self.names
        assert_same_across_ranks(
            {"list of gradients to read that no_sync() held back": ", ".join(names)},
            "Read gradients, and make steps, on all ranks at once.",
        )
        with torch.no_grad():
            for name in names:
                held = self._held.pop(name)
                assert held.own is not None
                total = sum_over_data_axes(held.own, held.parameter, self.mesh)
                # a loop may have kept the gradient, which stays the same object on one device
                held.reduced = total if held.reduced is None else _settle(held.reduced).add_(total)
                held.parameter.grad, held.own = held.reduced, None

    def take(self, name: str) -> torch.Tensor | None:
        """A gradient that no longer is held back; None if there is none, or it was discarded."""
        held = self._held.pop(name, None)
        if held is None or not held.is_current:
            return None
        held.parameter.grad = None if held.reduced is None else _settle(held.reduced)
        return held.own


@functools.cache
def _reduce_before_steps() -> None:
    """Makes steps reduce gradients of their parameters that are held back, from now on."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    return after_gradients(args, kwargs, functools.partial(_reduce_gradients, optimizer))


def _reduce_gradients(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter.grad, HeldGradient):
                parameter.grad._held.read()


def _is_data(axis: str) -> bool:
    return axis in (DATA_AXIS, *DATA_STORAGE_AXES)


def mesh_of_plain_sums(plan: Plan | None, mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh, if gradients are sums over its data axes and nothing else."""
    if plan is None or mesh is None:
        return None
    names = mesh.mesh_dim_names or ()
    others = [name for name in names if name != "tp" and not _is_data(name)]
    is_other_sum = any(plan.compressions.reduce) or plan.local_steps or plan.row_shares
    is_elsewhere = plan.offload_parameters or plan.batch_semantics == "local"
    return None if others or is_other_sum or is_elsewhere else mesh


def sum_over_data_axes(
    part: torch.Tensor, parameter: torch.Tensor, mesh: DeviceMesh
) -> torch.Tensor:
    """The sum of a gradient over the ranks with other rows, in the layout of its parameter.

    The addend `part` is whole along the data axes, and local along the others.
    """
    wanted: Sequence[Placement] = [Replicate()] * mesh.ndim
    if isinstance(parameter, DTensor):
        wanted, mesh = parameter.placements, parameter.device_mesh
    is_data = [_is_data(name) for name in mesh.mesh_dim_names or ()]
    parts, sums = (
        [other if flag else place for flag, place in zip(is_data, wanted, strict=True)]
        for other in (Partial(), Replicate())
    )
    shape, stride = parameter.shape, parameter.stride()
    addends = DTensor.from_local(part, mesh, parts, run_check=False, shape=shape, stride=stride)
    # the sum first: gloo has no uneven reduce-scatter
    total = addends.redistribute(placements=sums).redistribute(placements=wanted)
    return in_layout_of(parameter, total.to_local())
