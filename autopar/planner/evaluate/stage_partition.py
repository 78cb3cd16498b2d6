"""`partition_stages`: cuts a model into stages by dynamic programming over its cut points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

SLACK = 0.03
"""By how much the slowest stage may be slower than it need be, where less is sent for that."""

MOST = 192
"""Places that are tried; of more, those where the fewest bytes cross."""

_POWER = 16
"""The sum of so high powers of what each rank takes is nearly that of the slowest."""

Cuts = tuple[int, ...]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Segment:
    """What a model does from one place where it may be cut to the next.

    Attributes:
        seconds: of its forward and backward, for one micro-batch.
        held_bytes: of the parameters that are first used here, and all that belongs to them.
        saved_bytes: what its backward reads of its forward, for one micro-batch.
        sent_bytes: what is sent on, if it is cut before this.
        returned_bytes: what is sent back, if it is cut before this.
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
) -> Cuts | None:
    """The cuts whose slowest rank is fastest; of cuts as good, those that send the fewest bytes.

    A stage takes what its segments take and what it sends on and back: in 1F1B neighbours wait for
    each other's transfers. With one stage on each rank this is the optimum, but for `SLACK`; with
    several it is as good as the best way to move as many cuts as lie between two stages of a rank.

    Args:
        segments: in the order in which they run, at least as many as stages.
        ranks: of the pipeline; stage s is on rank s % ranks.
        in_flight: for each stage, how many micro-batches it holds activations of.
        transfer: seconds of so many bytes.
        cap: bytes that a rank may hold of parameters and activations.

    Returns:
        The first segment of each stage but the first; None if none were found under the cap.
    """
    places = _places(segments, len(in_flight))
    table = _Table(segments, places, ranks, in_flight, transfer, cap)
    found = table.one_by_one() if len(in_flight) == ranks else table.by_rank()
    return None if found is None else tuple(places[cut] for cut in found)


def _places(segments: Sequence[Segment], stages: int) -> list[int]:
    """Where it may be cut, with both ends."""

    def crossing(place: int) -> int:
        return segments[place].sent_bytes + segments[place].returned_bytes

    inner = sorted(range(1, len(segments)), key=crossing)[: max(MOST, stages)]
    return [0, *sorted(inner), len(segments)]


class _Table:
    """Sums over every run of segments: entry [i, j] is from the i-th place up to the j-th."""

    def __init__(
        self,
        segments: Sequence[Segment],
        places: Sequence[int],
        ranks: int,
        in_flight: Sequence[int],
        transfer: Callable[[int], float],
        cap: int | None,
    ) -> None:
        self.ranks, self.in_flight, self.cap = ranks, in_flight, cap
        self.last = len(places) - 1
        at = [Segment(0.0), *(segments[place] for place in places[1:-1]), Segment(0.0)]
        sent = np.array([transfer(s.sent_bytes) if s.sent_bytes else 0.0 for s in at])
        returned = np.array([transfer(s.returned_bytes) if s.returned_bytes else 0.0 for s in at])
        self.crossing = np.array([float(s.sent_bytes + s.returned_bytes) for s in at])
        self.empty = np.tril(np.ones((len(at), len(at)), dtype=bool))
        self.seconds = _runs([s.seconds for s in segments], places) + returned[:, None] + sent
        self.held = _runs([s.held_bytes for s in segments], places)
        self.saved = _runs([s.saved_bytes for s in segments], places)

    def one_by_one(self) -> Cuts | None:
        """The best cuts where each rank has one stage."""
        bytes_of = [self.memory(stage) for stage in range(len(self.in_flight))]
        over = [self.cap is not None and held > self.cap for held in bytes_of]
        prices = [np.where(self.empty | full, np.inf, self.seconds) for full in over]
        cuts = self.cut(prices, np.maximum)
        if cuts is None:
            return None
        limit = (1.0 + SLACK) * max(self.of_stages(cuts))
        sent = [np.where(price <= limit, self.crossing[:, None], np.inf) for price in prices]
        return self.cut(sent, np.add) or cuts

    def by_rank(self) -> Cuts | None:
        """Good cuts where each rank has several stages, whose seconds add up.

        Of as many neighbouring stages as there are ranks each rank has one, so that the best cuts
        between them are known if all others stay. They are found from every stage on, again and
        again.
        """
        even = [np.where(self.empty, np.inf, self.seconds)] * len(self.in_flight)
        cuts = self.cut(even, np.maximum)
        assert cuts is not None
        least = np.inf
        while (now := self.pressure(cuts)) < 0.99 * least:
            least = now
            for first in range(len(self.in_flight) - self.ranks + 1):
                cuts = self.moved(cuts, first)
        cuts = self.cheaper(cuts)
        held = self.of_ranks([float(self.memory(s)[run]) for s, run in self.stages(cuts)])
        return cuts if self.cap is None or held.max() <= self.cap else None

    def moved(self, cuts: Cuts, first: int) -> Cuts:
        """These cuts, but for the best between as many stages as there are ranks."""
        runs, rows = self.stages(cuts), range(first, first + self.ranks)
        loads = self.of_ranks(self.of_stages(cuts))
        held = self.of_ranks([float(self.memory(s)[run]) for s, run in runs])
        prices = []
        for stage in rows:
            run, rank = runs[stage][1], stage % self.ranks
            memory = self.memory(stage)
            load = loads[rank] - self.seconds[run] + self.seconds
            pressure = self._pressure(load, held[rank] - memory[run] + memory)
            prices.append(np.where(self.empty, np.inf, pressure))
        window = (runs[first][1][0], runs[rows[-1]][1][1])
        found = self.cut(prices, np.add, window) or ()
        return (*cuts[:first], *found, *cuts[rows[-1] :])

    def cheaper(self, cuts: Cuts) -> Cuts:
        """These cuts, each moved to where the fewest bytes cross, as far as `SLACK` lets it."""
        limit = (1.0 + SLACK) ** _POWER * self.pressure(cuts)
        for index in range(len(cuts)):
            ends = (0, *cuts, self.last)
            moved = [
                (*cuts[:index], place, *cuts[index + 1 :])
                for place in range(ends[index] + 1, ends[index + 2])
            ]
            near = [tried for tried in moved if self.pressure(tried) <= limit]
            cuts = min(near, key=self.sent)
        return cuts

    def sent(self, cuts: Cuts) -> float:
        """Bytes that cross all cuts."""
        return float(self.crossing[list(cuts)].sum())

    def pressure(self, cuts: Cuts) -> float:
        """What is to be made small: mostly what the slowest rank takes."""
        held = self.of_ranks([float(self.memory(s)[run]) for s, run in self.stages(cuts)])
        return float(self._pressure(self.of_ranks(self.of_stages(cuts)), held).sum())

    def _pressure(self, seconds: Matrix, held: Matrix) -> Matrix:
        mean = float(self.seconds[0, self.last]) / self.ranks
        full = (held / self.cap) ** (4 * _POWER) if self.cap else 0.0
        return (seconds / mean) ** _POWER + full

    def cut(
        self,
        prices: Sequence[Matrix],
        combine: Callable[[Matrix, Matrix], Matrix],
        window: tuple[int, int] | None = None,
    ) -> Cuts | None:
        """The cuts whose combined price is least; None if that is infinite.

        Args:
            prices: for each stage, of every run of segments.
            combine: the prices of two parts to that of both: their sum, or the larger one.
            window: from where to where; None for all.
        """
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
        """Bytes that every run of segments would hold as this stage."""
        return self.held + self.in_flight[stage] * self.saved

    def stages(self, cuts: Cuts) -> list[tuple[int, tuple[int, int]]]:
        """Each stage, and from where to where it goes."""
        return [*enumerate(pairwise((0, *cuts, self.last)))]

    def of_stages(self, cuts: Cuts) -> list[float]:
        """Seconds of each stage."""
        return [float(self.seconds[run]) for _, run in self.stages(cuts)]

    def of_ranks(self, values: Sequence[float]) -> Matrix:
        """Values of stages, added up on each rank."""
        return np.array(values).reshape(-1, self.ranks).sum(axis=0)


def _runs(values: Sequence[float], places: Sequence[int]) -> Matrix:
    """Sums of values from every place up to every other."""
    until = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])[list(places)]
    return until[None, :] - until[:, None]
