"""`RoundTimes`: step times by round, and the plans that a sequential test has not ruled out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

LEVEL = 0.02
"""Largest probability of such times for a plan as fast as the fastest, to rule it out."""


@dataclass
class RoundTimes:
    """Step times of plans that run in turn, in rounds.

    A round has one step of every plan that is left, so that drift of the machine cancels out.

    Attributes:
        left: indices of the plans that are not slower than the fastest, as far as is known.
        rounds: seconds by index of a plan, for each round.
    """

    left: list[int]
    rounds: list[dict[int, float]] = field(default_factory=list)

    def add(self, seconds: Sequence[float]) -> None:
        """Adds a round: a step time for each plan that is left."""
        self.rounds.append(dict(zip(self.left, seconds, strict=True)))

    def rule_out(self) -> None:
        """Drops plans that a Wilcoxon signed-rank test finds slower than the fastest."""
        seconds = self.medians()
        fastest = min(self.left, key=seconds.__getitem__)
        self.left = [i for i in self.left if i == fastest or not self._is_slower(i, fastest)]

    def medians(self) -> dict[int, float]:
        """Median step time of each plan in seconds, relative to the mean of plans left."""
        means = [statistics.fmean(row[i] for i in self.left) for row in self.rounds]
        typical = statistics.median(means)
        relative: dict[int, list[float]] = {}
        for row, mean in zip(self.rounds, means, strict=True):
            for index, seconds in row.items():
                relative.setdefault(index, []).append(seconds / mean)
        return {i: typical * statistics.median(row) for i, row in sorted(relative.items())}

    def _is_slower(self, index: int, other: int) -> bool:
        from scipy.stats import wilcoxon  # takes most of a second, for races only

        pairs = [(row[index], row[other]) for row in self.rounds if index in row]
        ratios = [math.log(slow / fast) for slow, fast in pairs]
        return any(ratios) and bool(wilcoxon(ratios, alternative="greater").pvalue < LEVEL)
