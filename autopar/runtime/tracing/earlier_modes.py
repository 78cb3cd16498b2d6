"""`as_called`: programs of an earlier call, which its backward needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from autopar.errors import StrategyError
from autopar.runtime.codegen.surroundings import autocast_to
from autopar.runtime.context import ExecutionContext


@contextlib.contextmanager
def as_called(context: ExecutionContext, modes: tuple[Any, ...]) -> Iterator[None]:
    """Restores the autocast of a call, for a capture or a program that its backward needs.

    Loops run backwards outside of their autocast block. A program found there without it would
    compute gradients of another forward.

    Raises:
        StrategyError: modules or parameters are in another mode than `modes`.
    """
    with torch.enable_grad(), autocast_to(context.device.type, modes[0]):
        if modes != context.modes:
            raise StrategyError(
                "a backward needs another program of its call, because gradients were held back, "
                "another output has a gradient, or create_graph=True. The model was put in "
                "another mode since (train, eval, requires_grad): change it after the backward."
            )
        yield
