"""`partition_stages`: partitions a model into stages, by dynamic programming over cut points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SLACK = 0.03
"""Tolerated relative slowdown of the slowest stage in exchange for less traffic."""

MAX_CUT_POINTS = 192
"""Maximum number of cut points to try; those with the least traffic are kept."""

_POWER = 16
"""Exponent of the soft maximum over ranks."""

Cuts = tuple[int, ...]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Segment:
    """The part of a model between two neighbouring cut points, for one micro-batch.

    Attributes:
        seconds: seconds of its forward and backward.
        held_bytes: bytes of the parameters first used here, with gradients and optimizer state.
        saved_bytes: bytes that its forward saves for its backward.
        sent_bytes: bytes of the forward that cross a cut before it.
        returned_bytes: bytes of the backward that cross a cut before it.
    """

    seconds: float
    held_bytes: int = 0
    saved_bytes: int = 0
    sent_bytes: int = 0
    returned_bytes: int = 0


def partition_stages(
    segments: Sequence[Segment],
    ranks: int,
    in_flight: Sequence[int],
    transfer: Callable[[int], float],
    cap: int | None = None,
    paces: Sequence[float] = (),
    rank_of: Sequence[int] = (),
) -> Cuts | None:
    """Finds cuts that minimise the time of the slowest rank, then traffic.

    The time of a stage includes its messages, since neighbours in 1F1B await them. The result is
    optimal up to `SLACK` with one stage per rank, and a local optimum with several.

    Args:
        segments: segments in execution order, at least as many as stages.
        ranks: number of pipeline ranks.
        in_flight: number of micro-batches in flight, for each stage.
        transfer: seconds of a message, by its bytes.
        cap: limit of a rank's parameter and activation bytes; None for no limit.
        paces: seconds that each rank takes for a second of compute; () if all take one.
        rank_of: rank of each stage; () for stage s on rank s % ranks.

    Returns:
        First segment of each stage but the first; None if no cuts fit the cap.
    """
    places = _cut_points(segments, len(in_flight))
    paces = tuple(paces) or (1.0,) * ranks
    rank_of = tuple(rank_of) or tuple(stage % ranks for stage in range(len(in_flight)))
    table = _Partitioner(segments, places, paces, in_flight, transfer, cap, rank_of)
    found = table.solve_exactly() if len(in_flight) == ranks else table.solve_locally()
    return None if found is None else tuple(places[cut] for cut in found)


def _cut_points(segments: Sequence[Segment], stages: int) -> list[int]:
    """Indices of possible first segments of a stage, with both ends of the model."""

    def crossing(place: int) -> int:
        return segments[place].sent_bytes + segments[place].returned_bytes

    inner = sorted(range(1, len(segments)), key=crossing)[: max(MAX_CUT_POINTS, stages)]
    return [0, *sorted(inner), len(segments)]


class _Partitioner:
    """Dynamic programming over ranges of segments: entry [i, j] spans cut points i to j."""

    def __init__(
        self,
        segments: Sequence[Segment],
        places: Sequence[int],
        paces: Sequence[float],
        in_flight: Sequence[int],
        transfer: Callable[[int], float],
        cap: int | None,
        rank_of: Sequence[int],
    ) -> None:
        self.ranks, self.in_flight, self.cap = len(paces), in_flight, cap
        self.rank_of = rank_of
        self.last = len(places) - 1
        at = [Segment(0.0), *(segments[place] for place in places[1:-1]), Segment(0.0)]
        sent = np.array([transfer(s.sent_bytes) if s.sent_bytes else 0.0 for s in at])
        returned = np.array([transfer(s.returned_bytes) if s.returned_bytes else 0.0 for s in at])
        self.crossing = np.array([float(s.sent_bytes + s.returned_bytes) for s in at])
        self.empty = np.tril(np.ones((len(at), len(at)), dtype=bool))
        compute = _range_sums([s.seconds for s in segments], places)
        # neighbours on one rank, as in a V, send each other nothing
        crosses = (False, *(a != b for a, b in pairwise(rank_of)), False)
        kinds = [(paces[r], crosses[s], crosses[s + 1]) for s, r in enumerate(rank_of)]
        by_kind = {
            (pace, before, after): pace * compute + before * returned[:, None] + after * sent
            for pace, before, after in set(kinds)
        }
        self.crosses = np.array(crosses[1:-1])
        self.seconds = [by_kind[kind] for kind in kinds]
        self.mean = float(np.mean(paces)) * compute[0, self.last] / len(paces)
        self.held = _range_sums([s.held_bytes for s in segments], places)
        self.saved = _range_sums([s.saved_bytes for s in segments], places)

    def solve_exactly(self) -> Cuts | None:
        bytes_of = [self.memory(stage) for stage in range(len(self.in_flight))]
        over = [self.cap is not None and held > self.cap for held in bytes_of]
        prices = [
            np.where(self.empty | full, np.inf, self.seconds_on(stage))
            for stage, full in enumerate(over)
        ]
        cuts = self.cut(prices, np.maximum)
        if cuts is None:
            return None
        limit = (1.0 + SLACK) * max(self.stage_seconds(cuts))
        sent = [np.where(price <= limit, self.crossing[:, None], np.inf) for price in prices]
        return self.cut(sent, np.add) or cuts

    def solve_locally(self) -> Cuts | None:
        """Locally optimal cuts with several stages per rank.

        A window of neighbouring stages with no two on one rank is solved exactly while all other
        cuts are fixed. The window slides over all stages until convergence.
        """
        stages = range(len(self.in_flight))
        alone = [np.where(self.empty, np.inf, self.seconds_on(stage)) for stage in stages]
        cuts = self.cut(alone, np.maximum)
        assert cuts is not None
        least = np.inf
        while (now := self.pressure(cuts)) < 0.99 * least:
            least = now
            for window in self.windows:
                cuts = self.reoptimize(cuts, window)
        cuts = self.reduce_traffic(cuts)
        return cuts if self.cap is None or self.held_by_rank(cuts).max() <= self.cap else None

    @cached_property
    def windows(self) -> list[range]:
        """The longest runs of stages with no two on one rank."""
        found: list[range] = []
        for first in range(len(self.rank_of)):
            after, seen = first, set[int]()
            while after < len(self.rank_of) and self.rank_of[after] not in seen:
                seen.add(self.rank_of[after])
                after += 1
            if not found or after > found[-1].stop:
                found.append(range(first, after))
        return found

    def reoptimize(self, cuts: Cuts, rows: range) -> Cuts:
        """Optimises the cuts inside a window of stages."""
        runs, first = self.runs(cuts), rows[0]
        loads, held = self.sum_by_rank(self.stage_seconds(cuts)), self.held_by_rank(cuts)
        prices = []
        for stage in rows:
            run, rank = runs[stage], self.rank_of[stage]
            memory = self.memory(stage)
            seconds = self.seconds_on(stage)
            load = loads[rank] - seconds[run] + seconds
            pressure = self._pressure(load, held[rank] - memory[run] + memory)
            prices.append(np.where(self.empty, np.inf, pressure))
        found = self.cut(prices, np.add, (runs[first][0], runs[rows[-1]][1])) or ()
        return (*cuts[:first], *found, *cuts[rows[-1] :])

    def reduce_traffic(self, cuts: Cuts) -> Cuts:
        """Moves each cut to the least traffic within `SLACK`."""
        # Pressure sums powers of seconds, so the slack in seconds takes the same power.
        limit = (1.0 + SLACK) ** _POWER * self.pressure(cuts)
        for index in range(len(cuts)):
            ends = (0, *cuts, self.last)
            moved = [
                (*cuts[:index], place, *cuts[index + 1 :])
                for place in range(ends[index] + 1, ends[index + 2])
            ]
            near = [tried for tried in moved if self.pressure(tried) <= limit]
            cuts = min(near, key=self.traffic)
        return cuts

    def traffic(self, cuts: Cuts) -> float:
        """Bytes that travel between ranks."""
        return float((self.crossing[list(cuts)] * self.crosses).sum())

    def pressure(self, cuts: Cuts) -> float:
        """Objective: soft maximum of the ranks' seconds and of their bytes relative to the cap."""
        loads = self.sum_by_rank(self.stage_seconds(cuts))
        return float(self._pressure(loads, self.held_by_rank(cuts)).sum())

    def _pressure(self, seconds: Matrix, held: Matrix) -> Matrix:
        # A steeper power leaves bytes under the cap nearly free; above it they outweigh time.
        full = (held / self.cap) ** (4 * _POWER) if self.cap else 0.0
        return (seconds / self.mean) ** _POWER + full

    def cut(
        self,
        prices: Sequence[Matrix],
        combine: Callable[[Matrix, Matrix], Matrix],
        window: tuple[int, int] | None = None,
    ) -> Cuts | None:
        """Cuts with the minimum combined cost, inside a window if given; None if it is infinite."""
        begin, end = window or (0, self.last)
        best = np.full(self.last + 1, np.inf)
        best[begin] = 0.0
        choices = []
        for price in prices:
            total = combine(best[:, None], price)
            choices.append(total.argmin(axis=0))
            best = total.min(axis=0)
        if not best[end] < np.inf:
            return None
        cuts = [end]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        return tuple(cuts[-2:0:-1])

    def memory(self, stage: int) -> Matrix:
        return self.held + self.in_flight[stage] * self.saved

    def runs(self, cuts: Cuts) -> list[tuple[int, int]]:
        return [*pairwise((0, *cuts, self.last))]

    def stage_seconds(self, cuts: Cuts) -> list[float]:
        return [float(self.seconds_on(s)[run]) for s, run in enumerate(self.runs(cuts))]

    def seconds_on(self, stage: int) -> Matrix:
        """Seconds of each range of segments on the rank of a stage."""
        return self.seconds[stage]

    def held_by_rank(self, cuts: Cuts) -> Matrix:
        return self.sum_by_rank([float(self.memory(s)[r]) for s, r in enumerate(self.runs(cuts))])

    def sum_by_rank(self, values: Sequence[float]) -> Matrix:
        return np.bincount(self.rank_of, values, self.ranks).astype(np.float64)


def _range_sums(values: Sequence[float], places: Sequence[int]) -> Matrix:
    until = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])[list(places)]
    return until[None, :] - until[:, None]
