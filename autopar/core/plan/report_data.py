"""`ReportData`: details of a predicted step, for the HTML page and the trace only."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.common.documents import Amount, Count, Duration, Positive, Seconds

TimelineEvent = tuple[str, str, Seconds, Seconds, str]
"""Node name, stream, start in seconds, end in seconds, and kind."""

MOST_POINTS = 512
"""Maximum number of points of a memory curve."""

Span = tuple[str, str, Seconds, Seconds]
"""Block name, "forward" or "backward", start and end in seconds."""


@dataclass(frozen=True)
class CollectiveCall:
    """One collective of a program.

    Attributes:
        name: name of the node that issues it.
        wait: name of the node that waits for it.
        block: block of the model.
        nbytes: message size in bytes.
        shapes: text of the shapes and dtypes of the tensors.
    """

    name: str
    wait: str
    block: str
    nbytes: Count
    shapes: str


@dataclass(frozen=True)
class StageProgram:
    """Operators of one micro-batch of pipeline stages with equal programs.

    Attributes:
        stages: stages that run it.
        actions: seconds and events of each kind of action: "F", "B", "I" or "W"; times are
            relative to its start.
        calls: collectives of the program.
        sent: text of the shapes sent to the next stage.
        returned: text of the shapes of gradients sent to the previous stage.
    """

    stages: tuple[Count, ...]
    actions: tuple[tuple[str, Seconds, tuple[TimelineEvent, ...]], ...]
    calls: tuple[CollectiveCall, ...]
    sent: str = ""
    returned: str = ""


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
    """Data of a predicted step for the HTML report and the trace.

    Attributes:
        ranks_per_node: number of ranks of a node; 0 if unknown.
        spans: blocks in execution order; empty for a pipeline.
        memory_s: sample times in seconds; at most MOST_POINTS, including the peak.
        memory: bytes of each nonempty category, at the times `memory_s`.
        traffic: collectives of a step.
        calls: collectives of the program; empty for a pipeline.
        programs: operators of the stages of a pipeline; first of a middle micro-batch, then of
            the last one where it differs.
    """

    ranks_per_node: Count = 0
    spans: tuple[Span, ...] = ()
    memory_s: tuple[Seconds, ...] = ()
    memory: tuple[tuple[str, tuple[Count, ...]], ...] = ()
    traffic: tuple[Traffic, ...] = ()
    calls: tuple[CollectiveCall, ...] = ()
    programs: tuple[StageProgram, ...] = ()
