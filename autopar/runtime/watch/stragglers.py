"""`Stragglers`: warns of ranks and links that are slower than others, step after step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Generic, NamedTuple, TypeVar

from torch import distributed as dist

from autopar.core.common.notices import warn_once
from autopar.errors import StragglerWarning
from autopar.runtime.watch.links import Probe, probe_links

SLOW = 1.2
"""Ratio to the median from which a rank or a link counts as slow."""

MATTERS = 0.05
"""Fraction of a step that a rank's work must exceed the median by."""

WAITING = 0.2
"""Fraction of a step that every rank waits, from which links are worth a look."""

LASTING = 3
"""Comparisons in succession in which a rank or a link must be slow."""

SPARING = 1000
"""Seconds of training for each second of probing links."""

RANK_ADVICE = (
    "Waits for other ranks are left out, so it computes or reads data slowly. All ranks wait for "
    "it. model.rebalance() gives it fewer rows under ddp and ZeRO."
)
LINK_ADVICE = "All ranks wait for it. Look at the network of these two ranks' machines."

Key = TypeVar("Key", int, tuple[int, int])


class Pace(NamedTuple):
    """Medians of a rank's last training steps.

    Attributes:
        work_s: seconds of a step in which the rank did not wait for other ranks.
        work_s_per_row: the same for each of its rows.
        waited_s: seconds of a step in which it waited.
        total_s: seconds of all these steps.
        stage: pipeline stage; ranks of one stage have the same work.
    """

    work_s: float
    work_s_per_row: float
    waited_s: float
    total_s: float
    stage: int


@dataclass
class Lasting(Generic[Key]):
    """Ranks or links that stay slow.

    Attributes:
        counts: comparisons in succession in which each was slow.
        named: those that a warning has named.
    """

    counts: dict[Key, int] = field(default_factory=dict)
    named: set[Key] = field(default_factory=set)

    def saw(self, slow: Iterable[Key]) -> list[Key]:
        """Ranks or links to name now: slow for long enough, and not named before."""
        self.counts = {key: self.counts.get(key, 0) + 1 for key in slow}
        lasting = {key for key, count in self.counts.items() if count >= LASTING}
        new = sorted(lasting - self.named)
        self.named.update(new)
        return new


@dataclass
class Stragglers:
    """Slow ranks and links of a module, the same on all ranks.

    Attributes:
        ranks: slow ranks.
        links: slow links, by the ranks that send and receive.
        trained_s: seconds of training since the last probe of links.
        probe_s: seconds that this probe took.
    """

    ranks: Lasting[int] = field(default_factory=Lasting)
    links: Lasting[tuple[int, int]] = field(default_factory=Lasting)
    trained_s: float = 0.0
    probe_s: float = 0.0

    def saw(self, paces: Sequence[Pace], group: dist.ProcessGroup) -> None:
        """Compares all ranks, and their links if all ranks wait; all ranks call this at once."""
        slow = slow_ranks(paces)
        if named := [_slow_rank(r, paces[r].work_s, slow[r]) for r in self.ranks.saw(slow)]:
            warn_once(StragglerWarning, f"{'; '.join(named)}. {RANK_ADVICE}")
        self.trained_s += max(pace.total_s for pace in paces)
        waits = min(pace.waited_s / (pace.waited_s + pace.work_s) for pace in paces)
        if waits >= WAITING and self.trained_s >= SPARING * self.probe_s:
            probe = probe_links(group)
            self.trained_s, self.probe_s = 0.0, probe.seconds
            ratios = slow_links(probe)
            if named := [_slow_link(x, probe.times[x], ratios[x]) for x in self.links.saw(ratios)]:
                warn_once(StragglerWarning, f"{'; '.join(named)}. {LINK_ADVICE}")


def slow_ranks(paces: Sequence[Pace]) -> dict[int, float]:
    """Ratio of the work of each slow rank to the median of its stage.

    A rank is slow by the step and by the row: it may have more rows, or fewer because it is slow.
    """
    found = {}
    for rank, pace in enumerate(paces):
        peers = [each for each in paces if each.stage == pace.stage]
        # median_low: of two ranks, the mean of both would hide the slow one.
        middle = median_low(each.work_s for each in peers)
        by_row = pace.work_s_per_row / median_low(each.work_s_per_row for each in peers)
        matters = pace.work_s - middle >= MATTERS * (pace.work_s + pace.waited_s)
        if matters and min(pace.work_s / middle, by_row) >= SLOW:
            found[rank] = pace.work_s / middle
    return found


def slow_links(probe: Probe) -> dict[tuple[int, int], float]:
    """Ratio of the time of each slow link to the median of links between machines."""
    hosts = probe.hosts
    times = {(a, b): s for (a, b), s in probe.times.items() if hosts[a] != hosts[b]}
    middle = median_low(times.values()) if times else 0.0
    return {link: s / middle for link, s in times.items() if s >= SLOW * middle}


def _slow_rank(rank: int, work_s: float, ratio: float) -> str:
    return (
        f"rank {rank} is slow in its own work: {_ms(work_s)} of a step, {ratio:.2f} times the "
        f"median of {_ms(work_s / ratio)}"
    )


def _slow_link(link: tuple[int, int], seconds: float, ratio: float) -> str:
    return (
        f"the link from rank {link[0]} to rank {link[1]} is slow: {_ms(seconds)} for a probe, "
        f"{ratio:.2f} times the median of {_ms(seconds / ratio)}"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
