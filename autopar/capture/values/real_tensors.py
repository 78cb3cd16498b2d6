"""`RealTensors`: real tensors that a trace meets, and whose values it must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from autopar._torch import (
    FakeTensor,
    FunctionalTensor,
    is_functional,
    is_transformed,
    without_modes,
)
from autopar.capture.values.pure_calls import tensors_in
from autopar.errors import CaptureError, StrategyError

_REFUSAL = "mutating a non-functional tensor"


class RealTensors:
    """Copies of the real tensors among the arguments of a trace's functions.

    A forward that changes a plain attribute, a global variable or a closure in place changes it
    while it is traced, too.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def meet(self, given: Iterable[Tensor]) -> None:
        """Copies the real ones among a function's tensors, before it runs."""
        for x in given:
            if id(x) not in self._copies and _is_real(x):
                with without_modes(), torch.no_grad():
                    self._copies[id(x)] = x, x._version, x.detach().clone()

    @staticmethod
    def check(given: Iterable[Tensor], result: Any, where: tuple[str, int] | None) -> None:
        """Checks that no result trains a real tensor, which a graph holds as a constant.

        Raises:
            StrategyError: one would, at this file and line.
        """
        if not any(x.requires_grad for x in tensors_in(result)):
            return
        for x in given:
            if x.requires_grad and _is_real(x):
                line = "" if where is None else " at {}:{}".format(*where)
                raise StrategyError(
                    f"forward trains a tensor of shape {list(x.shape)}{line} that is no parameter "
                    "of the model, such as an attribute with requires_grad, a variable of a "
                    "closure, an item of a list, or a parameter of a module given as an argument. "
                    "Make it an "
                    "nn.Parameter or a submodule of the model, or detach() it."
                )

    def restore(self) -> None:
        """Gives tensors that were changed their values again."""
        with without_modes(), torch.no_grad():
            for tensor, version, value in self._copies.values():
                if tensor._version != version:
                    tensor.copy_(value)


def _is_real(x: Tensor) -> bool:
    if isinstance(x, FakeTensor | FunctionalTensor) or is_functional(x) or is_transformed(x):
        return False
    # Inference tensors have no version that would tell of a change.
    return not x.is_inference()


@contextlib.contextmanager
def explaining_writes() -> Iterator[None]:
    """Names the cause where torch refuses to write a traced tensor into a real one.

    Raises:
        CaptureError: it did.
    """
    try:
        yield
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
        raise CaptureError(
            "forward writes computed values into a tensor that is made of numbers or static "
            "arguments, or that is neither a buffer nor an attribute of a module. Register it as "
            "a buffer, or write into a clone."
        ) from None
