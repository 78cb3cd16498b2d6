"""`Retracing`: traces forward again while a model trains, and refuses another graph.

Guards follow the Python state that forward read. This is the net below them, for state that no
guard sees: a clock, or what an extension in C keeps. The program would repeat its first values.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter
from typing import Any

from autopar.capture.trace import Capture, capture
from autopar.errors import CaptureError
from autopar.runtime.agreement.captured_graph import describe, without_source
from autopar.runtime.codegen.surroundings import apart_from_hooks
from autopar.runtime.context import ExecutionContext
from autopar.runtime.rng import keep_random_state

SPARING = 20.0
"""Seconds of training for each second of tracing again, so that it costs a twentieth at most."""


@dataclass(frozen=True)
class Trace:
    """A capture that a call used, and the kind of call that it holds for."""

    capture: Capture
    mode: tuple[Any, ...]


@dataclass
class Retracing:
    """Training calls of a module, of which the 2nd, 4th, 8th, ... are traced again.

    Attributes:
        calls: number of training calls.
        begin: time of the first call, or of the end of the last trace, in seconds.
        due: what the next call traces again, None for nothing.
    """

    calls: int = 0
    begin: float | None = None
    due: Trace | None = None

    def called(self, context: ExecutionContext) -> None:
        """Notes a training call; the next one is traced again if it is time."""
        self.calls += 1
        now, used = perf_counter(), context.last_capture
        if self.begin is None:
            self.begin = now
        is_turn = self.calls & (self.calls - 1) == 0 and self.calls > 1
        # what was derived from other shapes was never traced with these
        if not is_turn or used is None or used.traced is None or used.is_derived:
            return
        if now - self.begin >= SPARING * used.capture_s:
            self.due = Trace(used, context.mode_key)

    def check(self, context: ExecutionContext) -> None:
        """Traces the noted call again, if the state that guards see is the same.

        Raises:
            CaptureError: another graph came out.
        """
        due, self.due = self.due, None
        if due is None or due.mode != context.mode_key:
            return
        assert due.capture.traced is not None
        one, other = (
            describe(due.capture.traced),
            describe(_trace_again(context, due.capture).graph),
        )
        self.begin = perf_counter()
        pairs = zip_longest(one, other, fillvalue="nothing more")
        changes = ((a, b) for a, b in pairs if without_source(a) != without_source(b))
        if (change := next(changes, None)) is not None:
            before, after = change
            raise CaptureError(
                f"{type(context.model).__name__} computes something else than when it was "
                f"captured: {before} was traced then, {after} before call {self.calls + 1}. "
                "Its forward reads something that changes and that autopar cannot follow, such as "
                "a clock. Give it as an argument, or keep it in an attribute of the model."
            )


def _trace_again(context: ExecutionContext, captured: Capture) -> Capture:
    """Captures the call of a capture in full, and keeps nothing of it."""
    assert captured.call is not None
    options = context.capture_options(differentiate=True)
    with keep_random_state(context.device), apart_from_hooks(), context.autocast():
        return capture(context.model, captured.call, **options)
