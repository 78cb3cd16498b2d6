"""`KnownValues`: static arguments, and what forward computes from them alone.

Functions of known tensors run at once, outside of the trace, so that Python may read their values.
Together with a traced tensor a known one is a constant of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar._torch import pytree, without_modes
from autopar.errors import CaptureError

MOST_KNOWN = 4096
"""Elements of a known tensor that is made from numbers."""

_FACTORIES = frozenset({torch.tensor, torch.as_tensor, torch.arange})
_IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__iand__", "__ior__"})


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
        """The result of a function of known tensors, in a tuple; None for any other function.

        Raises:
            CaptureError: a traced tensor is written into a known one.
        """
        if not self:
            return None
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not given:
            return self._made(func, args, kwargs) if func in _FACTORIES else None
        if all(tensor in self for tensor in given):
            with without_modes(), is_random() as random:
                result = func(*args, **kwargs)
            if random():
                return None
            self._add(result)
            return (result,)
        if args[0] in self and writes(func):
            raise CaptureError(
                "forward writes computed values into a tensor made of static arguments or "
                "numbers. Write into a clone of it, made by a function of a computed tensor."
            )
        return None

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
        made = (x for x in pytree.tree_leaves(result) if isinstance(x, Tensor))
        self._tensors |= {id(tensor): tensor for tensor in made}


@contextlib.contextmanager
def is_random() -> Iterator[Callable[[], bool]]:
    """Tells whether code inside draws random numbers; torch's random state stays as it was."""
    before, drawn = torch.get_rng_state(), False
    yield lambda: drawn
    if drawn := not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
