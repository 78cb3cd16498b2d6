"""`ShardedTensor`: a parameter, gradient or state of a sharded model, as a training loop uses it.

Operators on elements run on each rank's part, such as those of optimizers. Every other operator
sees the whole tensors, on all ranks at once, and yields plain ones: norms, indices, matrix products
and random draws are those of one device, and so is what they write in place.

torch's DTensor has a rule for each operator instead. Some read a shard for the whole (`item()`,
draws on a CPU), lose what is written to a view, or communicate on some ranks alone.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar._torch import OpOverload, current_backward, local_tensor, pytree
from autopar.core.common.notices import warn_once
from autopar.errors import AutoparWarning, StrategyError
from autopar.runtime.agreement.channel import channel
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.agreement.replicas import checksum
from autopar.runtime.parameters.dtensor_layout import dtensor_from_local, is_sharded, local_shard
from autopar.runtime.parameters.sharded_norm import LazyNorm
from autopar.runtime.parameters.sharded_view import Root, views_of
from autopar.runtime.parameters.shared_memory import GivenMemory
from autopar.runtime.parameters.unread import UnreadTensor
from autopar.runtime.parameters.whole_values import (
    average_of_ranks,
    has_shards,
    own_part,
    read_whole,
    write_whole,
)

aten = torch.ops.aten

_ON_PARTS = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten._to_copy.default,
        aten.copy_.default,
        aten.fill_.Scalar,
        aten.fill_.Tensor,
        aten.zero_.default,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.masked_fill_.Scalar,
        aten.masked_fill_.Tensor,
        aten.where.ScalarSelf,
        aten.where.ScalarOther,
    }
)
"""Operators on elements that torch does not tag so."""

_SUMS = (aten.add.Tensor, aten.add_.Tensor)
"""Operators by which autograd adds gradients of one tensor."""

_REDUCTIONS = ("aten::_foreach_norm", "aten::_foreach_max")


class _Unaligned(Exception):
    """An argument is not laid out as the others."""


class ShardedTensor(DTensor):
    """A DTensor whose operators have the results of one device, on every rank of its mesh."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.new_empty_strided.default and list(args[1]) == list(args[0].shape):
            # autograd copies a gradient that something else holds, on one rank perhaps
            func, args = aten.empty_like.default, args[:1]
        runs_autograd = torch.is_grad_enabled() or current_backward() >= 0
        with torch.no_grad():
            # Autograd sums the gradients of a parameter before any hook sees them. A sharded sum
            # keeps this rank's part alone of a plain addend, so ranks average the addend first.
            if func in _SUMS and current_backward() >= 0:
                args = _averaged(func, args)
            if _is_elementwise(func) and not (runs_autograd and _differs_by_rank(args, kwargs)):
                try:
                    return _run_on_parts(func, args, kwargs)
                except _Unaligned:
                    pass
            if func is aten.linalg_vector_norm.default and _is_of_all(*args, **kwargs):
                return LazyNorm(args[0], *(args[1:2] or (2.0,)))
            return _run_on_whole(func, args, kwargs)

    @property
    def data(self) -> torch.Tensor:
        """The values, without gradient; other values may be assigned."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise StrategyError(
                f"a parameter of shape {list(self.shape)} and {self.dtype} is assigned data of "
                f"shape {list(value.shape)} and {value.dtype}. Change shapes and dtypes before "
                "autopar.compile."
            )
        with torch.no_grad():
            self.copy_(value)
        if type(value) is torch.Tensor:
            self.given_memory = GivenMemory(value)

    def tolist(self) -> Any:
        """The whole tensor as lists; all ranks call this at once."""
        return read_whole(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as an array to read; all ranks call this at once."""
        array = read_whole(self).numpy(force=force)
        array.flags.writeable = False  # what is written there would be lost
        return array

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return read_whole(self).__array__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of this rank's part, without gradient, as copies of parameters are."""
        if not self.is_leaf:
            return super().__deepcopy__(memo)  # torch's error
        if id(self) not in memo:
            copied = sharded_like(self._local_tensor.detach().clone(), self)
            copied.__class__ = type(self)
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as a DTensor, which any process can load."""
        warn_once(
            AutoparWarning,
            "a sharded tensor is pickled: the file has this rank's part of it alone. One file of "
            "whole tensors is torch.save of model.full_state_dict() and "
            "model.full_optimizer_state_dict(optimizer), which all ranks call. "
            "autopar.Checkpointer saves the parts of all ranks.",
        )
        return DTensor(self._local_tensor, self._spec, requires_grad=False).__reduce_ex__(protocol)


def sharded_like(part: torch.Tensor, like: DTensor) -> ShardedTensor:
    """A tensor of this rank's part, with the layout and global shape of another.

    `DTensor.from_local` takes 60 us, which a step would pay for every parameter.
    """
    return ShardedTensor(part, _spec_of(like._spec, part.dtype), requires_grad=False)


def as_sharded(tensor: DTensor) -> ShardedTensor:
    """The same shards of a DTensor."""
    return sharded_like(local_tensor(tensor), tensor)


def _spec_of(spec: Any, dtype: torch.dtype) -> Any:
    meta = spec.tensor_meta
    if meta.dtype == dtype:
        return spec
    return dataclasses.replace(spec, tensor_meta=meta._replace(dtype=dtype))


@functools.cache
def _is_elementwise(func: OpOverload) -> bool:
    """Whether each element of the results depends on the same element of the arguments alone."""
    name = func._schema.name
    if any("Tensor" not in str(result.type) for result in func._schema.returns):
        return False  # torch.equal
    if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(_REDUCTIONS):
        return False
    is_multi = name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_"))
    return func in _ON_PARTS or is_multi or torch.Tag.pointwise in func.tags


@functools.cache
def _written(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, argument.name) for i, argument in arguments if argument.is_write)


def _values_written(func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in _written(func)]


# On this rank's parts.


def _run_on_parts(func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Any:
    values = [*args, *kwargs.values()]
    lists = [x for x in values if isinstance(x, (list, tuple))]
    likes = [_like(row) for row in zip(*filter(_has_tensors, lists), strict=False)] if lists else []
    like = _like(values)
    parts = [_part(value, like, likes) for value in values]
    written = _values_written(func, args, kwargs)
    # A plain tensor takes part as a slice: only this rank's part of it would be written.
    if not all(isinstance(x, (DTensor, list, tuple)) or x is None or x.dim() == 0 for x in written):
        raise _Unaligned
    count = len(args)
    result = func(*parts[:count], **dict(zip(kwargs, parts[count:], strict=True)))
    if written:
        return written[0] if func._schema.returns else None
    if isinstance(result, (list, tuple)):
        return type(result)(
            x if of is None else sharded_like(x, of) for x, of in zip(result, likes, strict=True)
        )
    assert like is not None
    return sharded_like(result, like)


def _averaged(func: OpOverload, args: Any) -> Any:
    """Gradients to add to that of a sharded parameter, as `OutsideGradients` averages them."""
    agreement = channel()
    if agreement is None or not agreement.averages_gradients:
        return args
    sums = args[: len(_written(func))]  # a `.grad`, averaged before
    addends = args[len(sums) :]
    return *sums, *(average_of_ranks(x) if type(x) is torch.Tensor else x for x in addends)


def _differs_by_rank(args: Any, kwargs: Any) -> bool:
    """Whether an operator that autograd runs reads plain values that differ between ranks.

    Under `batch="local"` a loop may scale a penalty by its own loss. Each part of the result would
    then be of another rank's numbers, and no rank would have its own result.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    trained = (isinstance(x, DTensor) and x.requires_grad for x in leaves)
    if current_backward() < 0 and not any(trained):
        return False  # of `.data`, as in a loop's own optimizer
    agreement = channel()
    if agreement is None or not agreement.averages_gradients:
        return False
    values = [_comparable(x) for x in leaves if not isinstance(x, DTensor)]
    values = [value for value in values if value is not None]
    if not values:
        return False
    return any(each != values for each in gather_objects(values, "compares numbers of the loop"))


def _comparable(value: Any) -> int | float | complex | None:
    """A number that stands for a plain number or tensor; None for anything else."""
    if isinstance(value, UnreadTensor):
        value = value.read()
    if isinstance(value, torch.Tensor):
        return checksum(value.detach())
    return value if isinstance(value, (int, float, complex)) else None


def _has_tensors(values: Sequence[Any]) -> bool:
    return bool(values) and isinstance(values[0], torch.Tensor)


def _like(values: Sequence[Any]) -> DTensor | None:
    """The tensor whose layout the others must have."""
    found = [x for x in values if isinstance(x, DTensor)]
    return max(found, key=DTensor.dim) if found else None


def _part(value: Any, like: DTensor | None, likes: Sequence[DTensor | None]) -> Any:
    if isinstance(value, (list, tuple)) and _has_tensors(value):
        return [_part(x, of, ()) for x, of in zip(value, likes, strict=False)]
    if not isinstance(value, torch.Tensor) or like is None:
        return value
    if isinstance(value, UnreadTensor):
        value = value.read()
    if isinstance(value, DTensor):
        own, other = value._spec, like._spec
        if own is other or (own.placements, own.shape) == (other.placements, other.shape):
            return value._local_tensor
        raise _Unaligned
    if value.dim() == 0:
        return value
    if not _broadcasts(value.shape, like.shape):
        raise _Unaligned
    return own_part(value, like)


def _broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(own in (1, size) for own, size in pairs)


# On whole tensors.


def _run_on_whole(func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> Any:
    wholes: dict[int, torch.Tensor] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, UnreadTensor):
            return value.read()
        if not isinstance(value, DTensor):
            return value
        # One whole for all places of a tensor: what an operator writes to one argument, it may read
        # as another.
        if id(value) not in wholes:
            wholes[id(value)] = read_whole(value)
        return wholes[id(value)]

    args_of_whole, kwargs_of_whole = pytree.tree_map(whole, (tuple(args), dict(kwargs)))
    result = func(*args_of_whole, **kwargs_of_whole)
    written = _values_written(func, args, kwargs)
    for value in pytree.tree_leaves(written):
        if isinstance(value, DTensor):
            write_whole(value, wholes[id(value)])
    if written:
        return written[0] if func._schema.returns else None
    if func.is_view and has_shards(args[0]):
        return views_of(Root(args[0], args_of_whole[0]), result)
    return result


def _is_of_all(
    tensor: torch.Tensor,
    order: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> bool:
    """Whether a norm is that of all elements, which the norms of parts give."""
    whole = not dim and not keepdim and dtype is None and order > 0
    return whole and isinstance(tensor, DTensor) and not tensor.is_meta and has_shards(tensor)


def distribute_replicated(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]
) -> ShardedTensor:
    """A sharded tensor of one that every rank has whole, without communication."""
    part = tensor
    for axis, placement in enumerate(placements):
        if is_sharded(placement):
            part = local_shard(part, placement, mesh.get_local_rank(axis), mesh.size(axis))
    # Without the clone, a contiguous slice would keep the memory of the whole tensor alive.
    made = dtensor_from_local(part.contiguous().clone(), mesh, placements, tensor.shape)
    return as_sharded(made)


def in_layout_of(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A local part in the layout of its parameter; unchanged if that is a plain tensor."""
    return sharded_like(part, parameter) if isinstance(parameter, DTensor) else part
