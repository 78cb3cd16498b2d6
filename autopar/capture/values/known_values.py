"""`KnownValues`: static arguments, and what forward computes from them alone.

Functions of known tensors run at once, outside of the trace, so that Python may read their values.
Together with a traced tensor a known one is a constant of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar._torch import without_modes
from autopar.capture.values.pure_calls import Impure, run_purely, tensors_in

MOST_KNOWN = 4096
"""Elements of a known tensor that is made from numbers."""

_FACTORIES = frozenset({torch.tensor, torch.as_tensor, torch.arange})


class KnownValues:
    """Tensors with known values, by identity."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = {id(tensor): tensor for tensor in tensors}

    def __bool__(self) -> bool:
        return bool(self._tensors)

    def __contains__(self, value: object) -> bool:
        return id(value) in self._tensors

    def run(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any] | None:
        """The result of a function of known tensors, in a tuple; None for any other function."""
        if not self:
            return None
        given = tensors_in((args, kwargs))
        if not given:
            return self._made(func, args, kwargs) if func in _FACTORIES else None
        if not all(tensor in self for tensor in given):
            return None
        try:
            result = run_purely(func, args, kwargs)
        except Impure:
            return None
        self._add(result)
        return (result,)

    def _made(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor] | None:
        """A small tensor of integers, made from numbers."""
        with without_modes():
            made = func(*args, **kwargs)
        if made.is_floating_point() or made.is_complex() or made.numel() > MOST_KNOWN:
            return None
        self._add(made)
        return (made,)

    def _add(self, result: Any) -> None:
        self._tensors |= {id(tensor): tensor for tensor in tensors_in(result)}
