"""`Overlap`: start and wait of the collectives of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.common.documents import Count


@dataclass(frozen=True)
class Overlap:
    """Start and wait of each collective of a graph, in the order of its overlap units.

    Distances count stretches of compute. A stretch ends where a gather is needed, where a gradient
    is ready, and at collectives within compute.

    Attributes:
        gather: stretches between the start of each forward gather and its first use.
        regather: stretches between the start of each backward gather and its first use.
        reduce: stretches between each gradient and its reduction, or the wait for it.
        stage: pipeline stage of the graph.
    """

    gather: tuple[float, ...] = ()
    regather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    stage: Count = 0
