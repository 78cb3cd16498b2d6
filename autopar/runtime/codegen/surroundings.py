"""Hooks and autocast around a call, apart from which plans and programs are made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch

from autopar._torch import hide_saved_tensors_hooks

Cast = torch.dtype | Literal[False]
"""The dtype that autocast casts to, False if it is off."""


@contextlib.contextmanager
def apart_from_hooks() -> Iterator[None]:
    """Hides the loop's hooks on saved tensors, such as those of `torch.utils.checkpoint`.

    Tracing a model saves tensors too. A checkpoint would count them as the call's, and stop the
    trace when it has seen enough. Anomaly detection would look for NaN in what planning measures.
    """
    # hooks of ours above the loop's would do, too, but torch carries hooks to gloo's threads, which
    # then wait for Python's lock under a profiler
    before = hide_saved_tensors_hooks(True)
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        hide_saved_tensors_hooks(before)


def autocast_to(device: str, cast: Cast) -> contextlib.AbstractContextManager[Any]:
    """The autocast of an earlier call; loops run backwards outside of their autocast block."""
    return torch.autocast(device, dtype=cast or None, enabled=bool(cast))
