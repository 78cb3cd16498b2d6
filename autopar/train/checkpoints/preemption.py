"""`Preemption`: ranks leave after the same step once one of them is told to.

Schedulers send SIGTERM before they take a machine: Slurm, Kubernetes and torchrun alike. The rank
that is told writes a step into torch's store: the second after its own. No other rank can be past
that step by then, for every step waits for all ranks, so all find it in time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from autopar._torch import default_store
from autopar.runtime.agreement.consensus import is_multi_rank

KEY = "autopar/last_step"
AHEAD = 2  # steps


class Preemption:
    """The wish to stop, heard by signal and shared among ranks."""

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> None:
        self.signals = signals
        self.received: signal.Signals | None = None
        self._told = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Notes signals inside the context; signals reach the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[signal.Signals, Any] = {
            each: signal.signal(each, self._note) for each in self.signals
        }
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def is_last(self, step: int) -> bool:
        """Whether all ranks stop after this step; every rank asks after every step."""
        if not is_multi_rank():
            return self.received is not None
        # torchrun keeps one store for all attempts. Without the attempt in the key, the last step
        # of an earlier one would stop this one.
        store, key = default_store(), f"{KEY}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if self.received is not None and not self._told:
            store.compare_set(key, "", str(step + AHEAD))
            self._told = True
        # `get` blocks until a key exists, hence the check.
        return store.check([key]) and step >= int(store.get(key))

    def exit_status(self) -> int:
        """The status of a process that a signal ended, as shells give it."""
        return 128 + (self.received or self.signals[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
