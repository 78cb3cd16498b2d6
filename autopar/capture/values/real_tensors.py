"""`RealTensors`: real tensors that a trace meets, and whose values it must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from autopar._torch import (
    FakeTensor,
    FunctionalTensor,
    is_functional,
    is_transformed,
    without_modes,
)
from autopar.errors import CaptureError

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

    def restore(self) -> None:
        """Gives tensors that were changed their values again."""
        with without_modes(), torch.no_grad():
            for tensor, version, value in self._copies.values():
                if tensor._version != version:
                    tensor.copy_(value)


def _is_real(x: Tensor) -> bool:
    if isinstance(x, FakeTensor | FunctionalTensor) or is_functional(x) or is_transformed(x):
        return False
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
