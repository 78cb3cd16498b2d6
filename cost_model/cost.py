"""`Cost`: a time with its origin, and the error for unknown times."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError

KINDS = ("measured", "imported", "modelled")


class ClusterError(PlanError):
    """A measurement or cluster file is invalid, or a time is unknown."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A time in seconds and its origin.

    Attributes:
        seconds: time in seconds.
        provenance: "measured WHEN on WHAT", "imported from SOURCE" or "modelled by FORMULA".
        error: relative half-width of the error bar: 0.1 for 10 %.
        host_s: seconds of the host that issues the work, beside the device; 0 on a CPU.
    """

    seconds: float
    provenance: str
    error: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        check_provenance(self.provenance)

    @property
    def kind(self) -> str:
        return self.provenance.split(" ", 1)[0]


def check_provenance(text: str) -> None:
    """Raises unless a provenance starts with one of KINDS."""
    if not isinstance(text, str) or not text.startswith(KINDS):
        raise ClusterError(f"provenance {text!r} starts with none of {KINDS}")


ZERO_COST = Cost(0.0, "modelled by nothing to do")
