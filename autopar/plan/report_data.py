"""`ReportData`: what a page draws of a predicted step, beside the figures that decide."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.common.documents import Amount, Count, Duration, Positive, Seconds

MOST_POINTS = 512
"""Of a memory curve: more than a page has pixels for."""

Span = tuple[str, str, Seconds, Seconds]
"""A block of the model, "forward" or "backward", and from when to when it runs, in seconds."""


@dataclass(frozen=True)
class Traffic:
    """What a rank sends over one axis by one kind of collective, and what such messages take.

    Attributes:
        collective: one of `collectives.COLLECTIVES`.
        axis: the mesh axis, or a level of one.
        groups: the groups that take part, as text.
        dtype: of the tensors.
        provenance: where the times come from.
        measured: bytes and seconds of each message that was timed over these groups; may be empty.
        modelled: bytes, seconds and the relative half-width of their error bar, along the curve.
        sent: size in bytes of each message of a step, how many there are, and seconds of one.
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
    """What a page draws of a predicted step.

    Attributes:
        ranks_per_node: of the cluster; 0 if not known.
        spans: the blocks of the model in the order in which they run; none for a pipeline.
        memory_s: points of time, in seconds; at most MOST_POINTS, the peak among them.
        memory: bytes of each category that exist at each of them; categories without are left out.
        traffic: the collectives of a step.
    """

    ranks_per_node: Count = 0
    spans: tuple[Span, ...] = ()
    memory_s: tuple[Seconds, ...] = ()
    memory: tuple[tuple[str, tuple[Count, ...]], ...] = ()
    traffic: tuple[Traffic, ...] = ()
