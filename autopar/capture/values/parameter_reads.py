"""`ParameterReads`: what Python in forward reads of a parameter beside its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from autopar.core.ir.graph import ParameterInfo
from autopar.errors import CaptureError

_GRAD, _REQUIRES_GRAD, _IS_LEAF = Tensor.grad, Tensor.requires_grad, Tensor.is_leaf


class ParameterReads:
    """Answers as the plain parameter would, and refuses reads of `grad`.

    A traced parameter has no gradient, and is no leaf. Where gradients are off it requires none.
    """

    def __init__(
        self, traced: Mapping[str, Tensor], parameters: Mapping[str, ParameterInfo]
    ) -> None:
        self._traced = {id(traced[name]): (name, info) for name, info in parameters.items()}

    def read(self, func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool] | None:
        """The flag that the plain parameter has, in a tuple; None for any other call.

        Raises:
            CaptureError: the gradient of a trained parameter is read.
        """
        descriptor = getattr(func, "__self__", None)
        if not any(descriptor is each for each in (_GRAD, _REQUIRES_GRAD, _IS_LEAF)):
            return None
        if getattr(func, "__name__", "") != "__get__" or id(args[0]) not in self._traced:
            return None
        name, info = self._traced[id(args[0])]
        if descriptor is _REQUIRES_GRAD:
            return (info.requires_grad,)
        if descriptor is _IS_LEAF:
            return (True,)
        if not info.requires_grad:
            return None
        raise CaptureError(
            f"forward reads the gradient of parameter {name}, which a graph does not have. Read it "
            "in the loop, give forward what follows from it as an argument, or let autopar fall "
            "back (fallback=True)."
        )
