"""`PartMemory`: memory of one part of a step, and the peak of a model with more blocks.

Every block adds its state and its saved tensors to the end of the forward, and its state and
gradients to the end of the backward. Buckets near a peak belong to few neighbouring blocks, and so
do parameters that are gathered again for the backward: more blocks do not add more of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.memory.liveness import CATEGORIES

Bytes = NDArray[np.int64]

REACH = 0.75
"""Fraction of the backward that counts with the end of the forward, and with its own end.

With three blocks the middle one is near both.
"""

BUCKETED: Mapping[int, tuple[str, ...]] = {
    0: ("transient",),
    1: ("transient",),
    2: ("buckets", "in flight"),
    3: ("buckets", "in flight", "gathered"),
}
"""Categories of what buckets hold for a moment, by ZeRO stage.

Whole gradients wait for their bucket, and are in it until the optimizer's step.
"""


@dataclass(frozen=True, eq=False)
class PartMemory:
    """Memory of a part of a step.

    Attributes:
        peak: bytes at the peak of the part, [len(CATEGORIES)].
        level: bytes at the point whose growth stands for the part, [len(CATEGORIES)].
    """

    peak: Bytes
    level: Bytes


Parts = tuple[PartMemory, PartMemory, PartMemory]
"""Around the end of the forward, towards the end of the backward, and the optimizer's step."""


@dataclass(frozen=True)
class MoreBlocks:
    """A sample with one more block of some kinds than the sample with the fewest.

    Attributes:
        times: number of blocks of such a kind that the whole model has more than the fewest.
    """

    parts: Parts
    times: int


def parts_of_step(table: Bytes, forward: NDArray[np.bool_], progress: NDArray[np.float64]) -> Parts:
    """The parts of a step.

    Args:
        table: bytes at each point, [len(CATEGORIES), points]; the last is the optimizer's step.
        forward: whether each other point is in a forward, [points - 1]; a backward otherwise.
        progress: progress of that forward or backward from 0 to 1, [points - 1].
    """
    total = table[:, :-1].sum(axis=0)

    def part(within: NDArray[np.bool_], end: NDArray[np.bool_]) -> PartMemory:
        if not within.any():
            return update
        peak = np.where(within, total, -1).argmax()
        return PartMemory(table[:, peak].copy(), table[:, np.flatnonzero(end)[-1]].copy())

    update = PartMemory(table[:, -1].copy(), table[:, -1].copy())
    early, late = forward | (progress <= REACH), ~forward & (progress >= 1 - REACH)
    return part(early, forward if forward.any() else early), part(late, late), update


def grown_parts(
    few: Parts, samples: Sequence[MoreBlocks], zero_stage: int, bucket_bytes: int
) -> list[Bytes]:
    """Bytes at the peak of each part of the whole model's step, [len(CATEGORIES)] each.

    Every further block adds what the level grows by, without transient and BUCKETED bytes. The rest
    of a sample's difference is of blocks that share a moment, so that it counts once, for one kind
    only. BUCKETED bytes go on growing up to `bucket_bytes`, the most of all buckets at one moment.
    """
    bucketed = np.array([name in BUCKETED[zero_stage] for name in CATEGORIES])
    *halves, update = zip(few, *(each.parts for each in samples), strict=True)
    times = [each.times for each in samples]
    totals = [grown_peak(part, times, bucketed, bucket_bytes) for part in halves]
    base, *more = (part.level for part in update)  # a single moment
    totals.append(base + sum((own - base) * n for own, n in zip(more, times, strict=True)))
    return [np.maximum(total, 0) for total in totals]


def grown_peak(
    part: Sequence[PartMemory], times: Sequence[int], bucketed: NDArray[np.bool_], most: int
) -> Bytes:
    """Bytes at the peak of a part of the step, from those of all samples."""
    base, *samples = part
    lasts = ~bucketed & (np.array(CATEGORIES) != "transient")
    total, rests = base.peak.copy(), []
    for own, count in zip(samples, times, strict=True):
        lasting = np.where(lasts, own.level - base.level, 0)
        total += lasting * count
        rest = own.peak - base.peak - lasting
        once, room = rest[bucketed].sum(), most - own.peak[bucketed].sum()
        again = min(count - 1, max(0.0, room / once)) if once > 0 else 0.0
        rests.append(rest + np.where(bucketed, rest * again, 0).astype(np.int64))
    return total + max(rests, key=np.sum) if rests else total
