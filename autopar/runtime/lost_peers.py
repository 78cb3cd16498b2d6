"""Ranks that outlive another: one clear line instead of torch's errors.

The launcher (`autopar run`) ends such ranks within seconds, once it has seen the cause. Until then
an uncaught error of communication waits, so that the cause is the first error that anyone reads.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType

import torch

from autopar.errors import CommunicationError

LAUNCHED = "AUTOPAR_LAUNCHED"
"""Environment variable of ranks that `autopar run` has started: seconds to wait for it."""

SIGNS = (
    "Connection", "connection", "Timed out", "timed out", "timeout", "gloo", "NCCL", "peer",
)  # fmt: skip

_reported_before = sys.excepthook


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of torch says that communication with another rank has failed."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return any(sign in str(error) for sign in SIGNS)


def wait_for_launcher() -> None:
    """Lets an uncaught error of communication wait for the launcher, if there is one."""
    global _reported_before
    if LAUNCHED in os.environ and sys.excepthook is not _report:
        _reported_before, sys.excepthook = sys.excepthook, _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not (isinstance(error, CommunicationError) or is_lost_peer(error)):
        _reported_before(kind, error, trace)
        return
    time.sleep(float(os.environ[LAUNCHED]))
    print(f"autopar: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
