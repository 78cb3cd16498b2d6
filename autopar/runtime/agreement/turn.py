"""`Turn`: one thread at a time calls compiled models.

Ranks communicate in the order of their calls, and two threads take turns differently on each rank.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from autopar.errors import ThreadError

Function = TypeVar("Function", bound=Callable[..., Any])


class Turn:
    """A lock that refuses a second thread, and lets the first one in again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ThreadError(
                f"thread {threading.current_thread().name!r} uses a compiled model while another "
                "thread is in a call or a backward of one. Use compiled models from one thread, or "
                "give each thread's calls their place in an order that is the same on every rank."
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def in_turn(method: Function) -> Function:
    """The method of a module, which raises ThreadError in a second thread."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]
