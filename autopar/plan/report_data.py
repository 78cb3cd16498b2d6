"""`ReportData`: data for the HTML report only."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.common.documents import Amount, Count, Duration, Positive, Seconds

MOST_POINTS = 512
"""Maximum number of points of a memory curve."""

Span = tuple[str, str, Seconds, Seconds]
"""Block name, "forward" or "backward", start and end in seconds."""


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind of collective over one axis, and their times.

    Attributes:
        collective: one of `collectives.COLLECTIVES`.
        axis: mesh axis or level.
        groups: description of the process groups.
        dtype: dtype of the tensors.
        provenance: source of the times.
        measured: bytes and seconds of each timed message; may be empty.
        modelled: bytes, seconds and relative half-width of the error, at points of the cost curve.
        sent: bytes, count and seconds of each message size in a step.
    """

    collective: str
    axis: str
    groups: str
    dtype: str
    provenance: str
    measured: tuple[tuple[Positive, Duration], ...] = ()
    modelled: tuple[tuple[Positive, Duration, Amount], ...] = ()
    sent: tuple[tuple[Count, Count, Seconds], ...] = ()


@dataclass(frozen=True)
class ReportData:
    """Data of a predicted step for the HTML report only.

    Attributes:
        ranks_per_node: number of ranks of a node; 0 if unknown.
        spans: blocks in execution order; empty for a pipeline.
        memory_s: sample times in seconds; at most MOST_POINTS, including the peak.
        memory: bytes of each nonempty category, at the times `memory_s`.
        traffic: collectives of a step.
    """

    ranks_per_node: Count = 0
    spans: tuple[Span, ...] = ()
    memory_s: tuple[Seconds, ...] = ()
    memory: tuple[tuple[str, tuple[Count, ...]], ...] = ()
    traffic: tuple[Traffic, ...] = ()
