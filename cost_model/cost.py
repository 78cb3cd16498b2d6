"""`Cost`: a time that says where it comes from, and the error for when there is none to give."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError

KINDS = ("measured", "imported", "modelled")


class ClusterError(PlanError):
    """A measurement, a cluster file or a question to one that cannot be answered honestly."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A time in seconds and its origin.

    Attributes:
        seconds: the time, in seconds.
        provenance: "measured WHEN on WHAT", "imported from SOURCE" or "modelled by FORMULA".
    """

    seconds: float
    provenance: str

    def __post_init__(self) -> None:
        if not self.provenance.startswith(KINDS):
            raise ClusterError(f"provenance {self.provenance!r} starts with none of {KINDS}")

    @property
    def kind(self) -> str:
        """The first word of the provenance: measured, imported or modelled."""
        return self.provenance.split(" ", 1)[0]
