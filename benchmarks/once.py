"""What depends on no plan, done once for all plans of a model that a process trains."""

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
def captured_once() -> Iterator[None]:
    """Capture each kind of call of one model once, whoever compiles it."""
    made: dict[Any, Capture] = {}

    @functools.wraps(capture)
    def known(model: Any, call: Call, *given: Any, **options: Any) -> Capture:
        key = (call.leaves, call.structure, tuple(options.items()))
        if key not in made:
            made[key] = capture(model, call, *given, **options)
        return made[key]

    with mock.patch("autopar.runtime.context.capture", known):
        yield


@contextlib.contextmanager
def updates_measured_once() -> Iterator[None]:
    """Time an optimizer's step once, so that predictions differ in what plans do alone."""
    known = functools.cache(measure_update)
    with mock.patch("autopar.planner.machine.measure_update", known):
        yield
