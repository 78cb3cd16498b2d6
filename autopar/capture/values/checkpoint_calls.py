"""Calls of `torch.utils.checkpoint`: made so that any backward follows them, and watched.

The reentrant variant, the default where `use_reentrant` is not given, runs a backward inside the
backward. `autograd.grad` refuses it, so a trace does, and DDP sees gradients twice. The other
variant computes the same values and gradients.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from autopar._torch import FunctionalTensor, around_checkpoints, count_mutations, patched


class CheckpointCalls:
    """The checkpointed functions of a trace.

    Attributes:
        count: calls.
        changed_buffers: names of the buffers that the functions change.
    """

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.changed_buffers: set[str] = set()
        self._model = model

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Records the calls inside."""
        return around_checkpoints(self._around_call)

    @contextlib.contextmanager
    def _around_call(self) -> Iterator[None]:
        self.count += 1
        before = self._mutations()
        yield
        after = self._mutations()
        self.changed_buffers |= {name for name in after if after[name] != before.get(name, 0)}

    def _mutations(self) -> dict[str, int]:
        buffers = self._model.named_buffers()
        return {n: count_mutations(b.elem) for n, b in buffers if isinstance(b, FunctionalTensor)}


@contextlib.contextmanager
def without_reentrant_checkpoints() -> Iterator[None]:
    """Calls inside take the variant that is not reentrant, and so does what they compute again."""
    with patched(checkpoint, "CheckpointFunction", _PlainCheckpoint):
        yield


class _PlainCheckpoint:
    """Stands in for `torch.utils.checkpoint.CheckpointFunction`."""

    @staticmethod
    def apply(function: Callable[..., Any], preserves_rng: bool, *args: Any) -> Any:
        checkpoint.check_backward_validity(args)  # its warning is the plain model's
        trains = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        # the reentrant variant trains nothing where no argument needs a gradient
        with contextlib.nullcontext() if trains else torch.no_grad():
            return checkpoint.checkpoint(
                functools.partial(_run, function),
                *args,
                use_reentrant=False,
                preserve_rng_state=preserves_rng,
            )


def _run(function: Callable[..., Any], *args: Any) -> Any:
    with without_reentrant_checkpoints():
        return function(*args)
