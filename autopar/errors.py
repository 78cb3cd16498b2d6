"""Every error autopar raises on purpose, as one tree.

    AutoparError
    ├── CaptureError        the model cannot be traced into one graph
    ├── StrategyError       a strategy, option or launch contradicts itself or the machines
    ├── BatchError          the rows given cannot be split over the ranks, or differ between them
    ├── PlanError           a plan does not belong to this model, world or torch
    ├── OutOfMemoryError       nothing fits under the memory cap
    ├── DisagreementError   the ranks hold different models, plans or batches
    ├── CommunicationError  a collective failed: another rank died or left
    └── PassError           a graph pass broke its contract (a bug in autopar or in a user's pass)

Each message says what is wrong, where, and what to change.
"""


class AutoparError(Exception):
    """Base of all errors of autopar."""


class CaptureError(AutoparError):
    """The model cannot be captured into one forward and backward graph."""


class StrategyError(AutoparError, ValueError):
    """A strategy or option contradicts itself, the model or the machines."""


class BatchError(AutoparError, ValueError):
    """The rows of a batch cannot be split over the ranks."""


class PlanError(AutoparError, ValueError):
    """A plan was made for another model, world or version."""


class OutOfMemoryError(AutoparError):
    """No plan fits under the memory cap.

    Attributes:
        shortfall: bytes by which the smallest plan exceeds the cap.
    """

    def __init__(self, message: str, shortfall: int) -> None:
        super().__init__(message)
        self.shortfall = shortfall

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.shortfall)  # it travels from rank 0 to the others


class DisagreementError(AutoparError):
    """Ranks that must agree hold different models, plans or batches."""


class CommunicationError(AutoparError):
    """A collective failed, because another rank died, left or timed out."""


class PassError(AutoparError):
    """A pass broke its contract: the graph after it is not a legal one."""
