"""`Overlap`: start and wait of the collectives of a graph."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.common.documents import Count


@dataclass(frozen=True)
class Overlap:
    """Start and wait of each collective of a graph, in the order of its overlap units.

    Distances are in stretches of compute: stretches end where a gather is needed, where a gradient
    can be reduced, and where compute itself communicates.

    Attributes:
        gather: stretches between the start of each forward gather and its first use.
        regather: the same for gathers of the backward.
        reduce: stretches between each gradient and its reduction, or the wait for it.
        stage: pipeline stage of the graph.
    """

    gather: tuple[float, ...] = ()
    regather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    stage: Count = 0
