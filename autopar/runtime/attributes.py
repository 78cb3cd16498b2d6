"""`ModelAttributes`: a module with the attributes of the model it wraps."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from autopar.errors import StrategyError

OWN_ATTRIBUTES = {
    *vars(nn.Module()),
    "_wrapped",
    "_device",
    "_options",
    "_make_plan",
    "_make_fallback",
    "_fallback",
    "plan",
    "mesh",
    "_no_sync",
    "_pending_compression_state",
    "_context",
    "_protocol",
    "before_first_training_call",
    "_executor",
}
"""Attributes of the wrapper itself; all others are the model's."""


class ModelAttributes(nn.Module):
    """A module that forwards attribute access to the model it wraps.

    Attributes:
        _wrapped: the model, in a tuple so that it is not a submodule.
        _device: device of the tensors.
    """

    _wrapped: tuple[nn.Module, ...]
    _device: torch.device

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_wrapped":
                raise
            value = getattr(self._wrapped[0], name)
            # models of transformers return the device of their first parameter
            is_meta = isinstance(value, torch.device) and value.type == "meta"
            return self._device if is_meta else value

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled, since process groups and programs cannot be.

        Raises:
            StrategyError: always.
        """
        raise StrategyError(
            "a compiled model cannot be pickled, by torch.save or otherwise. Save "
            "model.state_dict(), with torch.save or torch.distributed.checkpoint, and load it into "
            "a model that was compiled again."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the model, unless it is one of the wrapper's own."""
        if name in OWN_ATTRIBUTES or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._wrapped[0], name, value)

    def __delattr__(self, name: str) -> None:
        if name in OWN_ATTRIBUTES:
            super().__delattr__(name)
        else:
            delattr(self._wrapped[0], name)


def check_not_compiled(model: nn.Module) -> None:
    """Raises StrategyError if autopar has compiled a model, or a module in it, before."""
    for name, module in model.named_modules():
        if isinstance(module, ModelAttributes):
            where = f"its submodule {name}" if name else "this model"
            raise StrategyError(
                f"{where} was compiled by autopar.compile before: compile the plain model once."
            )
