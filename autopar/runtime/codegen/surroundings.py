"""`apart_from_hooks`: plans and programs are made apart from the hooks of the loop's call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.autograd.graph import saved_tensors_hooks


@contextlib.contextmanager
def apart_from_hooks() -> Iterator[None]:
    """Hides the loop's hooks on saved tensors, such as those of `torch.utils.checkpoint`.

    Tracing a model saves tensors too. A checkpoint would count them as the call's, and stop the
    trace when it has seen enough.
    """
    with saved_tensors_hooks(_unchanged, _unchanged):  # torch asks the innermost hooks alone
        yield


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
