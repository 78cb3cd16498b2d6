"""Parameters that live on other pipeline stages: names and shapes here, no values.

A loop may change them, their gradients, and copies of these: the stage that has them does it. What
would bring a value of theirs to this rank is an error, so that a loop does not take one stage for
the whole model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from autopar._torch import pytree, without_subclasses
from autopar.errors import AutoparError, StrategyError
from autopar.runtime.parameters.shapes_alone import META, ShapesAlone, ValueNeededError
from autopar.runtime.parameters.sharded import ShardedTensor

_INTERNALS = ("torch.", "autopar.")
"""Modules that see such a parameter on the device where it is."""

_LOOPS = (
    "torch.amp.",
    "torch.nn.functional.",
    "torch.nn.init.",
    "torch.nn.modules.",
    "torch.nn.utils.",
    "torch.optim.",
)
"""Modules of torch that see it as a loop does, where the other stage has it."""

_UPDATERS = ("torch.optim.", "torch.amp.")
"""Modules that leave out parameters without gradient, as they find those of other stages."""

_KEEPERS = ("torch.optim.optimizer.", "autopar.")
"""Modules that handle such parameters as placeholders; the first discards gradients."""

_MODULES = "torch.nn.modules.module."
"""The module that loads and saves states, whose values stay marked."""

_METADATA = frozenset(
    {
        "__hash__",
        "__len__",
        "dim",
        "element_size",
        "is_complex",
        "is_conj",
        "is_contiguous",
        "is_floating_point",
        "is_same_size",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "size",
        "storage_offset",
        "stride",
        "swap_tensors",
    }
)
"""Functions that read no value."""

_GRAD: Any = torch.Tensor.grad
_DERIVATIVES: Any = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


@dataclass(frozen=True)
class Origin:
    """The parameter of another stage that a tensor is, or comes from.

    Attributes:
        device: where the other stage has it.
        is_sharded: whether graphs of a loop do not lead to it.
    """

    shape: torch.Size
    device: torch.device
    is_sharded: bool


class _Remote:
    """A tensor of another stage."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    origin: Origin

    @property
    def device(self) -> torch.device:
        """The device where its values are, for a loop that puts batches there."""
        return META if _is_internal(sys._getframe(1)) else self.origin.device

    @property
    def is_meta(self) -> bool:
        """Whether it has no values, as initialisers ask who then draw none."""
        return _is_internal(sys._getframe(1)) or self.origin.device == META

    @property
    def is_cpu(self) -> bool:
        return not _is_internal(sys._getframe(1)) and self.origin.device.type == "cpu"

    @property
    def is_cuda(self) -> bool:
        return not _is_internal(sys._getframe(1)) and self.origin.device.type == "cuda"

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, without values; None for optimizers, which leave it out."""
        module = module_of(sys._getframe(1))
        with without_subclasses():
            gradient: torch.Tensor | None = _GRAD.__get__(self)
        if gradient is None or module.startswith(_KEEPERS):
            return gradient
        return None if module.startswith(_UPDATERS) else _remote_like(gradient, self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with without_subclasses():
            if value is not None and not value.is_meta:
                value = torch.empty_like(self)  # type: ignore[arg-type]
            _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self, **_: Any) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, on another stage)"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        placeholder = torch.empty(self.shape, dtype=self.dtype, device=META)
        copied = _remote_like(placeholder.requires_grad_(self.requires_grad), self)
        if isinstance(self, nn.Parameter):
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module, kwargs = module_of(sys._getframe(1)), kwargs or {}
        if module.startswith(_KEEPERS):
            with without_subclasses():
                return func(*args, **kwargs)
        like = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Remote))
        if module == _MODULES:
            with without_subclasses():
                result = func(*args, **kwargs)
        else:
            result = _run(func, args, kwargs, like)
        return pytree.tree_map_only(torch.Tensor, lambda t: _remote_like(t, like), result)


class RemoteTensor(_Remote, torch.Tensor):  # type: ignore[misc, override]
    """A parameter of another stage, or a value that comes from one."""


class RemoteShard(_Remote, ShardedTensor):  # type: ignore[misc, override]
    """A sharded parameter of another stage."""


def mark_remote(parameter: nn.Parameter, device: torch.device) -> None:
    """Makes a parameter without values stand for one of another stage, from now on.

    Args:
        parameter: the parameter, on the meta device.
        device: where the other stage has it.
    """
    is_sharded, marked = isinstance(parameter, ShardedTensor), cast(Any, parameter)
    marked.__class__ = RemoteShard if is_sharded else RemoteTensor
    marked.origin, marked._is_param = Origin(parameter.shape, device, is_sharded), True


def is_on_other_stage(tensor: object) -> bool:
    """Whether a tensor is a parameter that was marked, or comes from one."""
    return isinstance(tensor, _Remote)


def check_no_values_needed(leaves: Iterable[Any]) -> None:
    """Raises StrategyError if an argument of a call comes from a parameter of another stage."""
    for leaf in leaves:
        if isinstance(leaf, _Remote):
            raise _error(leaf)


def module_of(frame: FrameType) -> str:
    """The name of the module whose code a frame runs, with a dot behind it."""
    return f"{frame.f_globals.get('__name__', '')}."


def _is_internal(frame: FrameType) -> bool:
    module = module_of(frame)
    return module.startswith(_INTERNALS) and not module.startswith(_LOOPS)


def _run(func: Any, args: Any, kwargs: Any, like: _Remote) -> Any:
    """The result of a function of torch, on shapes alone."""
    name = getattr(func, "__name__", "")
    if name in _METADATA:
        with without_subclasses():
            return func(*args, **kwargs)
    if func in _DERIVATIVES:
        if not any(map(is_on_other_stage, pytree.tree_leaves(args[0]))):
            return _differentiate(func, args, kwargs)
        if like.origin.is_sharded:
            raise _error(like)
    elif func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        return _assign(*args)
    else:
        _check_graphs(args, kwargs, like)
        # A DTensor would gather its shards here, and this one has no values.
        args, kwargs = pytree.tree_map_only(RemoteShard, _without_layout, (args, kwargs))
    try:
        with without_subclasses(), ShapesAlone(like.origin.device):
            result = func(*args, **kwargs)
    # Some errors of autopar are ValueErrors, which the last clause would replace.
    except AutoparError:
        raise
    except ValueNeededError:
        raise _error(like) from None
    except (RuntimeError, TypeError, ValueError) as error:  # torch's, where it needs values
        raise _error(like) from error
    is_property = name in ("__get__", "__set__")
    if not is_property and not all(map(_is_tensor_or_none, pytree.tree_leaves(result))):
        raise _error(like)
    return result


def _differentiate(func: Any, args: Any, kwargs: Any) -> Any:
    """Gradients of values of this rank, which all ranks of the pipeline compute."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    # a gradient of the results, for one
    others = [value for name, value in bound.arguments.items() if name != "inputs"]
    check_no_values_needed(pytree.tree_leaves(others))
    if (inputs := bound.arguments.get("inputs")) is not None:
        with without_subclasses():  # for the edges alone: hooks may use subclasses
            bound.arguments["inputs"] = pytree.tree_map_only(_Remote, get_gradient_edge, inputs)
    return func(*bound.args, **bound.kwargs)


def _assign(tensor: _Remote, value: torch.Tensor) -> None:
    """`tensor.data = value`, of which this rank takes the shape alone."""
    if isinstance(tensor, RemoteShard):
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise _error(tensor)
        return
    with without_subclasses():
        shaped = torch.empty_like(value, device=META)
        torch.Tensor.data.__set__(tensor, shaped)  # type: ignore[attr-defined]


def _check_graphs(args: Any, kwargs: Any, like: _Remote) -> None:
    """Raises StrategyError if a gradient would have to leave this rank."""
    if not torch.is_grad_enabled():
        return
    for leaf in pytree.tree_leaves((args, kwargs)):
        is_here = isinstance(leaf, torch.Tensor) and not isinstance(leaf, _Remote)
        if is_here and leaf.requires_grad:
            raise _error(like)


def _is_tensor_or_none(value: Any) -> bool:
    return value is None or isinstance(value, torch.Tensor)


def _without_layout(shard: RemoteShard) -> torch.Tensor:
    placeholder = torch.empty(shard.shape, dtype=shard.dtype, device=META)
    return placeholder.requires_grad_(shard.requires_grad)


def _remote_like(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """A tensor without values, as one of the stage that `like` is of."""
    if not tensor.is_meta:
        return tensor
    if isinstance(tensor, ShardedTensor) and not isinstance(tensor, _Remote):
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
    if type(tensor) is torch.Tensor:
        tensor.__class__ = RemoteTensor
    if isinstance(tensor, _Remote):
        tensor.origin = like.origin
    return tensor


def as_remote(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient as hooks see it: without values where its parameter has none."""
    return _remote_like(gradient, parameter) if isinstance(parameter, _Remote) else gradient


def _error(like: _Remote) -> StrategyError:
    return StrategyError(
        f"the value or gradient of a parameter of shape {list(like.origin.shape)} is read, which "
        "lives on another stage of the pipeline. With those of its own stage alone a rank would "
        "not train as one device. Clip gradients by model.clip_grad_norm_(), read and change "
        "values inside of `with model.gathered():`, make optimizers that need them all by "
        "model.whole_optimizer(), or leave pipelines out."
    )
