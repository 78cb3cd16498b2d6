"""`Deadline`: a time limit that long loops of planning check."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class TimeIsOver(BaseException):
    """Ends a step of planning after the deadline; `autopar.plan` turns it into a result.

    No `Exception`, so that handlers of failed traces and passes let it through.
    """


class Deadline:
    """A time limit from now on, None for no limit; a call returns whether time is left.

    Args:
        limit_s: seconds from `start_s`.
        start_s: begin in seconds of the clock; None for now.
        clock: seconds since any instant.
    """

    def __init__(
        self,
        limit_s: float | None,
        start_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s, self.clock = limit_s, clock
        self.start_s = clock() if start_s is None else start_s
        self.interrupted = self.armed = False

    def __call__(self) -> bool:
        return self.left_s > 0

    @property
    def passed_s(self) -> float:
        return self.clock() - self.start_s

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit, 0 after an interruption."""
        if self.interrupted:
            return 0.0
        return math.inf if self.limit_s is None else max(0.0, self.limit_s - self.passed_s)

    def interrupt(self) -> None:
        """Ends the time now."""
        self.interrupted = True

    def part(self, fraction: float) -> Deadline:
        """A deadline for a fraction of the limit from now, which ends no later than this one."""
        if self.limit_s is None:
            return self
        left_s = min(self.left_s, fraction * self.limit_s)
        return Deadline(left_s, self.clock(), self.clock)

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Makes `check_time` raise after the deadline, and Ctrl-C end the time.

        Before `arm` only Ctrl-C ends it, so that there is an answer. A second Ctrl-C raises
        KeyboardInterrupt at once.
        """
        token, restore = _current.set(self), _end_on_interrupt(self)
        try:
            yield
        finally:
            restore()
            _current.reset(token)


_current: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def check_time() -> None:
    """Raises TimeIsOver if the enforced deadline has passed and there is an answer."""
    deadline = _current.get()
    if deadline is None or deadline():
        return
    if deadline.armed or deadline.interrupted:
        raise TimeIsOver


def arm() -> None:
    """Lets the enforced deadline end the search, as there is an answer now."""
    deadline = _current.get()
    if deadline is not None:
        deadline.armed = True


def remaining_s() -> float:
    """Seconds until the enforced deadline; infinite without one or without an answer."""
    deadline = _current.get()
    return math.inf if deadline is None or not deadline.armed else deadline.left_s


def _end_on_interrupt(deadline: Deadline) -> Callable[[], object]:
    """Lets the next Ctrl-C end the time; returns what restores the handler."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return lambda: None

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        deadline.interrupt()

    signal.signal(signal.SIGINT, end)
    return lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
