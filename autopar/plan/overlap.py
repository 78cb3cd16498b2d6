"""`Overlap`: when collectives start and are awaited."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.common.documents import Count


@dataclass(frozen=True)
class Overlap:
    """When the collectives of a graph are issued and waited for.

    In stretches: the parts of main compute between the places where gathers are needed, where
    gradients can be summed, and where main compute itself communicates. In the order of the units
    of `chains.halves`, so that every rank, which has the same ones, makes the same order.

    Attributes:
        gather: how many stretches before they are needed gathers of the forward start.
        regather: the same for the backward.
        reduce: how many stretches after they could be at the earliest gradients are sent, or
            waited for.
        stage: of the pipeline, whose graph this is of.
    """

    gather: tuple[float, ...] = ()
    regather: tuple[float, ...] = ()
    reduce: tuple[float, ...] = ()
    stage: Count = 0
