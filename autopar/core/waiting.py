"""`awaited`: a wait with a limit, which says what it waits for and ends on signals."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

TELL_S = 5.0
"""Seconds between two lines about a wait."""

T = TypeVar("T")


def awaited(
    call: Callable[[], T],
    what: Callable[[], str],
    limit_s: float,
    say: Callable[[str], None],
) -> T:
    """The result of a call that may block inside torch, where Python meets no signals.

    The call runs in a thread of its own, which is left behind after the limit or a signal.

    Args:
        call: what may block.
        what: names what is waited for; asked before each line.
        limit_s: seconds until the wait ends, infinity for work without a limit.
        say: prints a line, every `TELL_S` seconds.

    Raises:
        TimeoutError: the call did not return within the limit.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="autopar-wait", daemon=True).start()
    end = time.monotonic() + limit_s
    while True:
        left_s = max(0.0, end - time.monotonic())
        if concurrent.futures.wait([done], min(TELL_S, left_s)).done:
            return done.result()
        if left_s <= TELL_S:
            raise TimeoutError(f"waited for {what()} for {limit_s:.0f} s")
        limit = f", for {left_s - TELL_S:.0f} s at most" if left_s < math.inf else ""
        say(f"waits for {what()}{limit}")
