"""Work that does not depend on the plan, done once for all plans of a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from autopar.capture.call import Call
from autopar.capture.trace import Capture, capture
from autopar.cost_model.measurement.optimizer_step import measure_update


@contextlib.contextmanager
def memoized_capture(known: dict[Any, Capture] | None = None) -> Iterator[None]:
    """Capture each kind of call of one model once for all compilations inside.

    Args:
        known: earlier captures of the same model, extended here.
    """
    captures = {} if known is None else known

    @functools.wraps(capture)
    def memoized(model: Any, call: Call, parameters: Any, **options: Any) -> Capture:
        key = (call.leaves, call.structure, tuple(options.items()))
        if key not in captures:
            captures[key] = capture(model, call, parameters, **options)
        return captures[key]

    with mock.patch("autopar.runtime.context.capture", memoized):
        yield


@contextlib.contextmanager
def memoized_update() -> Iterator[None]:
    """Time an optimizer's step once, so that predictions differ by plan alone."""
    memoized = functools.cache(measure_update)
    with mock.patch("autopar.planner.machine.measure_update", memoized):
        yield
