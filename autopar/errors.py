"""Every error that autopar raises on purpose, and every warning that it gives, as two trees.

    AutoparError
    ├── CaptureError        the model cannot be traced into one graph
    ├── ModelError          the model itself raises, or returns what no graph can
    ├── StrategyError       a strategy, option or launch contradicts itself or the machines
    │   └── CoupledRowsError   micro-batches would need each other's rows
    ├── BatchError          the rows given cannot be split over the ranks, or differ between them
    ├── PlanError           a plan does not belong to this model, world or torch
    ├── OutOfMemoryError       nothing fits under the memory cap
    ├── DisagreementError   the ranks hold, are given or do different things
    ├── CommunicationError  a collective failed: another rank died or left
    ├── VerificationError   a plan trained to other numbers than the plain model
    └── PassError           a graph pass broke its contract (a bug in autopar or in a user's pass)

    AutoparWarning
    ├── NumericsWarning     a result differs from the single device's
    ├── FallbackWarning     the model trains without a plan: under DDP, fully_shard or as it is
    ├── LossyWarning        values travel compressed, or a compressor's state is lost
    └── MeasurementWarning  measurements are out of date, left out or cannot be kept

Each message says what is wrong, where, and what to change. Warnings are given by
`autopar.common.notices.warn_once`: once a process, on rank 0, at the user's line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.formatting import printable


class AutoparError(Exception):
    """Base of all errors of autopar. Their text is safe to print, whatever names stand in it."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CaptureError(AutoparError):
    """The model cannot be captured into one forward and backward graph."""


class ModelError(AutoparError):
    """The model itself raises, or returns what autopar cannot take apart."""


class StrategyError(AutoparError, ValueError):
    """A strategy or option contradicts itself, the model or the machines."""


class CoupledRowsError(StrategyError):
    """Rows of different micro-batches depend on each other, so they cannot pass one by one."""


class BatchError(AutoparError, ValueError):
    """The rows of a batch cannot be split over the ranks."""


class PlanError(AutoparError, ValueError):
    """A plan was made for another model, world or version."""


@dataclass(frozen=True)
class Change:
    """Something that makes a plan fit where none does, found to do so by planning with it.

    Attributes:
        what: in words.
        how: what to write.
        step_s: seconds that a step then takes.
        needed_bytes: what a rank then needs.
    """

    what: str
    how: str
    step_s: float
    needed_bytes: int


class OutOfMemoryError(AutoparError):
    """No plan fits under the memory cap.

    Attributes:
        shortfall: bytes by which the smallest plan exceeds the cap.
        memory: what the peak of that plan consists of, bytes by category.
        changes: with each of which a plan fits, the least trouble first.
        cap: bytes that a rank may need, None where that was not said.
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
        # it travels from rank 0 to the others
        given = str(self), self.shortfall, self.memory, self.changes, self.cap
        return type(self), given


class DisagreementError(AutoparError):
    """Ranks that must agree hold different models, plans or batches, or do different things."""


class CommunicationError(AutoparError):
    """A collective failed, because another rank died, left or timed out."""


class PassError(AutoparError):
    """A pass broke its contract: the graph after it is not a legal one."""


class VerificationError(AutoparError):
    """A plan trained to other numbers than the plain model."""


class AutoparWarning(UserWarning):
    """Base of all warnings of autopar."""


class NumericsWarning(AutoparWarning):
    """A result differs from the single device's by more than rounding."""


class FallbackWarning(AutoparWarning):
    """The model trains without a plan: under torch's DDP, fully_shard, or as it is."""


class LossyWarning(AutoparWarning):
    """Values travel compressed, or a compressor's state starts anew."""


class MeasurementWarning(AutoparWarning):
    """Measurements are out of date, left out or cannot be kept."""
