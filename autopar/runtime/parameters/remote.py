"""Parameters that live on other pipeline stages: names and shapes here, no values.

A loop that reads them or their gradients would miss a part of the model. It gets an error, so that
it does not take one stage for all.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autopar._torch import pytree, without_subclasses
from autopar.common.notices import warn_once
from autopar.errors import NumericsWarning, StrategyError
from autopar.runtime.parameters.sharded import ShardedTensor

_READERS = ("torch.optim.", "torch.amp.", "torch.nn.modules.", "autopar.")
"""Modules that leave out parameters without gradient, as those of other stages are."""

_AVERAGES = "torch.optim.swa_utils."
"""A module of theirs that reads all parameters."""

_METADATA = frozenset(
    {
        "__hash__",
        "__len__",
        "__reduce_ex__",
        "__deepcopy__",
        "copy_",
        "detach",
        "dim",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "size",
        "storage_offset",
        "stride",
        "swap_tensors",
        "untyped_storage",
    }
)
"""Functions that read no value."""

_GRAD: Any = torch.Tensor.grad
_VALUES = ("T", "mT", "H", "mH", "data", "real", "imag")


class _Remote:
    """Refusals of a parameter that has no values on this rank."""

    shape: torch.Size

    @property
    def grad(self) -> torch.Tensor | None:
        """None for optimizers, or what no_sync holds back; an error for anyone else."""
        if not _leaves_out(sys._getframe(1)):
            raise _error("gradient", self.shape)
        with without_subclasses():
            return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and not _leaves_out(sys._getframe(1)):
            raise _error("gradient", self.shape)
        with without_subclasses():
            _GRAD.__set__(self, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            reads = func.__self__.__name__ in _VALUES
        else:
            reads = name not in _METADATA
        leaves_out = _leaves_out(sys._getframe(1))
        if reads and not leaves_out:
            leaves = pytree.tree_leaves((args, kwargs))  # stack and backward(inputs=) have lists
            raise _error("value", next(x.shape for x in leaves if isinstance(x, _Remote)))
        with without_subclasses():
            result = func(*args, **(kwargs or {}))
        if name == "detach" and not leaves_out:
            result.__class__ = RemoteShard if isinstance(result, ShardedTensor) else RemoteTensor
        return result


class RemoteTensor(_Remote, torch.Tensor):
    """A parameter of another stage, detached."""


class RemoteParameter(_Remote, nn.Parameter):
    """A parameter of another stage."""


class RemoteShard(_Remote, ShardedTensor):
    """A sharded parameter of another stage."""


def mark_remote(parameter: nn.Parameter) -> None:
    """Makes a parameter without values refuse to be read, from now on."""
    is_sharded = isinstance(parameter, ShardedTensor)
    parameter.__class__ = RemoteShard if is_sharded else RemoteParameter  # type: ignore[assignment]
    _leave_out_of_optimizers()


def is_on_other_stage(parameter: torch.Tensor) -> bool:
    """Whether a parameter was marked."""
    return isinstance(parameter, _Remote)


def _leaves_out(frame: FrameType) -> bool:
    """Whether the code of a frame leaves out parameters of other stages."""
    name = f"{frame.f_globals.get('__name__', '')}."
    return name.startswith(_READERS) and not name.startswith(_AVERAGES)


def _error(what: str, shape: torch.Size) -> StrategyError:
    return StrategyError(
        f"the {what} of a parameter of shape {list(shape)} is read, which lives on another stage "
        "of the pipeline. With those of its own stage alone a rank would not train as one device. "
        "Clip gradients by model.clip_grad_norm_(), read and change values inside of `with "
        "model.gathered():`, make optimizers that need them all by model.whole_optimizer(), or "
        "leave pipelines out."
    )


@functools.cache
def _leave_out_of_optimizers() -> None:
    """Makes optimizers leave out parameters of other stages, where they have any of this one."""
    add = Optimizer.add_param_group

    @functools.wraps(add)
    def add_own(self: Optimizer, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        own = [p for p in listed if not is_on_other_stage(p[1] if isinstance(p, tuple) else p)]
        if len(own) < len(listed) and not type(self).__module__.startswith("torch.optim"):
            warn_once(
                NumericsWarning,
                f"{type(self).__name__} has the parameters of this rank's stage alone. If it "
                "computes something of several of them, such as a norm of all gradients, the "
                "result is not that of one device: make it by model.whole_optimizer().",
            )
        add(self, {**param_group, "params": own or listed})

    Optimizer.add_param_group = add_own  # type: ignore[method-assign]
