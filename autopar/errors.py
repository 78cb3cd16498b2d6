"""Errors and warnings of autopar.

Each message says what is wrong, where, and what to change. `warn_once` of
`autopar.core.common.notices` gives warnings once a process, on rank 0, at the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.formatting import printable


class AutoparError(Exception):
    """Base of all errors of autopar; control characters in their text are escaped."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CaptureError(AutoparError):
    """The model cannot be traced into one forward and backward, or is differentiated twice."""


class ModelError(AutoparError):
    """The model itself raises, has names that are not text, or returns what cannot be unpacked."""


class StrategyError(AutoparError, ValueError):
    """A strategy, option or launch contradicts itself, the model or the machines."""


class CoupledRowsError(StrategyError):
    """Rows of different micro-batches depend on each other."""


class BatchError(AutoparError, ValueError):
    """The rows of a batch cannot be split over the ranks, or differ between them."""


class PlanError(AutoparError, ValueError):
    """A plan was made for another model, world or version of torch."""


@dataclass(frozen=True)
class Change:
    """A change with which a plan fits, where none does without it.

    Attributes:
        how: option or argument to set.
        step_s: predicted seconds of a step with the change.
        needed_bytes: bytes that a rank needs with the change.
    """

    what: str
    how: str
    step_s: float
    needed_bytes: int


class OutOfMemoryError(AutoparError):
    """No plan fits under the memory cap.

    Attributes:
        shortfall: bytes by which the smallest plan exceeds the cap.
        memory: peak bytes of that plan, by category.
        changes: changes with which a plan fits, the least intrusive first.
        cap: memory cap of a rank in bytes, None if unknown.
    """

    def __init__(
        self,
        message: str,
        shortfall: int,
        memory: Mapping[str, int] | None = None,
        changes: tuple[Change, ...] = (),
        cap: int | None = None,
    ) -> None:
        super().__init__(message)
        self.shortfall, self.memory, self.changes = shortfall, dict(memory or {}), changes
        self.cap = cap

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # ranks exchange it by pickle
        return type(self), (str(self), self.shortfall, self.memory, self.changes, self.cap)


class DisagreementError(AutoparError):
    """Ranks have different models, plans or batches, or run different calls."""


class CommunicationError(AutoparError):
    """A collective failed, because another rank died, left or timed out."""


class CheckpointError(AutoparError):
    """A checkpoint cannot be written or read, or is of another model."""


class OffloadError(AutoparError):
    """Storage for offloaded states is full, cannot be written, or fails."""


class ThreadError(AutoparError):
    """A second thread uses a compiled model while one is in a call or a backward of it."""


class PassError(AutoparError):
    """A graph pass broke its contract: a bug in autopar or in a user's pass."""


class VerificationError(AutoparError):
    """Training under a plan differs from the plain model."""


class AutoparWarning(UserWarning):
    """Base of all warnings of autopar."""


class NumericsWarning(AutoparWarning):
    """A result differs from the single device's by more than rounding."""


class FallbackWarning(AutoparWarning):
    """The model trains without a plan: under torch's DDP, fully_shard, or unchanged."""


class LossyWarning(AutoparWarning):
    """Messages are compressed, groups of ranks step apart, or state of either is lost."""


class MeasurementWarning(AutoparWarning):
    """Measurements are out of date, left out or cannot be kept."""


class CheckpointWarning(AutoparWarning):
    """A checkpoint is broken and skipped, or could not be written."""


class StragglerWarning(AutoparWarning):
    """A rank or a link is slower than the others for many steps, and all ranks wait for it."""
