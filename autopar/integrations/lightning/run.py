"""`Run`: what a step may read of its trainer while it is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

from autopar.capture.state.effects import CounterProxy
from autopar.errors import StrategyError

PLAIN = (bool, int, float, str, type(None))
_CURRENT: ContextVar[Run | None] = ContextVar("run", default=None)


class Run:
    """One call of a step; notes the facts that Python reads, since a program depends on them.

    Attributes:
        trainer: trainer of the step.
        read: names of the facts that were read: `batch_idx`, or attributes of the trainer.
    """

    def __init__(self, trainer: Any, batch_index: int) -> None:
        self.trainer, self._index = trainer, batch_index
        self._uses: list[str] = []
        self._read: dict[str, None] = {}

    @staticmethod
    def now() -> Run | None:
        """The run of the step that is being captured, if any."""
        return _CURRENT.get()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    @property
    def read(self) -> list[str]:
        return [*self._read, *(["batch_idx"] if self._uses else [])]

    @property
    def batch_index(self) -> Any:
        """A stand-in for the index of the batch that notes its use."""
        return CounterProxy(self._index, self._uses)

    def value_of(self, fact: str) -> Any:
        return self._index if fact == "batch_idx" else attrgetter(fact)(self.trainer)

    def read_fact(self, fact: str) -> Any:
        """The value of a fact, which the program will depend on.

        Raises:
            StrategyError: it is an object.
        """
        value = self.value_of(fact)
        if not isinstance(value, PLAIN):
            raise StrategyError(
                f"a step reads trainer.{fact}, a {type(value).__name__}, and a captured step would "
                "use its first state for ever. Use it in a hook instead, such as "
                "on_train_batch_end, and log what it needs by self.log."
            )
        self._read[fact] = None
        return value


class WatchedTrainer:
    """The trainer as a captured step sees it: numbers, texts and flags, each of them noted."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return self._run.read_fact(name)
