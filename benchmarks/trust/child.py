"""`in_child`: work in a forked process, which may hang, crash or be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Loaded here: each fork would take seconds, and as another user it may not even read the module.
import torch._dynamo  # noqa: F401

Tell = Callable[[Any], None]
"""Sends a message to the parent."""


@dataclass(frozen=True)
class Ended:
    """The answer of a child, and its end.

    Attributes:
        status: exit status, negative for a signal.
        hung: whether it was ended after its limit.
    """

    told: list[Any]
    status: int
    hung: bool


def in_child(work: Callable[[Tell], None], limit_s: float) -> Ended:
    """Run work in a fork of this process; its standard output and error are dropped."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = os.fork()
    if process == 0:
        status = 1
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(null, descriptor)
            work(theirs.send)
            status = 0
        finally:
            os._exit(status)
    theirs.close()
    told, end_s, hung = [], time.monotonic() + limit_s, False
    try:
        while not hung:
            if ours.poll(max(0.0, end_s - time.monotonic())):
                told.append(ours.recv())
            else:
                hung = True
                os.kill(process, signal.SIGKILL)
    except EOFError:
        pass  # it has ended
    finally:
        ours.close()
    return Ended(told, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), hung)
