"""Times of many collectives, taken in rounds within a budget of seconds.

The machine is noisier over seconds than over milliseconds, so all cases are timed in turn, in
another order each round, from the first second to the last. One trial repeats a short collective
until it has taken `TRIAL_S`: about as long as a step communicates, so that its mean has the jitter
that a step sees. The median over the trials then leaves out what disturbs a few of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean

import torch

from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.measurement.bench import Bench, message_bytes
from autopar.cost_model.measurement.group_layouts import Groups

TRIAL_S = 0.02
"""Seconds that one trial of a short collective lasts."""

LEAST_TRIALS = 3
_MOST_REPEATS = 50
_TRIES = 3

Layouts = Mapping[CurveKey, Sequence[Groups]]
"""For each curve the ways to lay its groups over the ranks; trials take them in turn."""

ReportProgress = Callable[[float], None]
"""Is told how much of the work is done, 0 to 1, on rank 0."""


@dataclass(frozen=True)
class Case:
    """One thing to time: a collective over groups of one shape, of about `nbytes` bytes."""

    key: CurveKey
    nbytes: int


@dataclass
class _Log:
    """What was timed, in the same order on every rank; None where this rank took no part."""

    cases: list[Case] = field(default_factory=list)
    groups: list[Groups] = field(default_factory=list)
    seconds: list[float | None] = field(default_factory=list)


def sample(
    bench: Bench, layouts: Layouts, sizes: Sequence[int], budget_s: float, tell: ReportProgress
) -> dict[CurveKey, dict[int, list[float]]]:
    """Seconds of each trial by curve and message size in bytes. Every rank calls it.

    Sizes that would take more than a curve's share of the budget are left out.

    Args:
        bench: the process group.
        layouts: what to time.
        sizes: about the message sizes, ascending.
        budget_s: about how many seconds to spend.
        tell: is told of progress, on rank 0.
    """
    start = time.perf_counter()
    log = _Log()
    first = _grow(bench, layouts, sizes, budget_s)
    _take_rounds(bench, layouts, first, start, budget_s, log, tell)
    return _by_curve(bench, log)


def _time(bench: Bench, layouts: Layouts, case: Case, turn: int, repeats: int) -> float | None:
    dtype = getattr(torch, case.key.dtype)
    groups = _groups(layouts, case, turn)
    return bench.time(case.key.collective, groups, case.nbytes, repeats, dtype)


def _groups(layouts: Layouts, case: Case, turn: int) -> Groups:
    ways = layouts[case.key]
    return ways[turn % len(ways)]


def _grow(
    bench: Bench, layouts: Layouts, sizes: Sequence[int], budget_s: float
) -> dict[Case, float]:
    """Every case by size, for about how long it takes; too slow curves grow no more."""
    share = budget_s / len(layouts)
    for key, ways in layouts.items():
        for turn in range(len(ways)):
            _time(bench, layouts, Case(key, sizes[0]), turn, 1)  # connects the ranks
    took: dict[Case, float] = {}
    going = list(layouts)
    for size, larger in zip(sizes, [*sizes[1:], 0], strict=True):
        slow = cases = [Case(key, size) for key in going]
        for _ in range(_TRIES):  # one that was held up is not slow
            for case in slow:
                seconds = _time(bench, layouts, case, 0, 2)
                if seconds is not None:
                    took[case] = min(seconds, took.get(case, seconds))
            slow = bench.agree(partial(_too_slow, took, cases, larger, share))
        going = [case.key for case in cases if case not in slow]
    return bench.agree(lambda: took)


def _too_slow(
    took: Mapping[Case, float], cases: Sequence[Case], larger: int, share: float
) -> list[Case]:
    """The curves whose next size, `larger`, is not expected to fit in their share."""
    limit = share / 8  # growing takes a third of the share then, three trials of each size a half
    return [case for case in cases if took[case] * larger / case.nbytes >= limit]


def _take_rounds(
    bench: Bench,
    layouts: Layouts,
    first: Mapping[Case, float],
    start: float,
    budget_s: float,
    log: _Log,
    tell: ReportProgress,
) -> None:
    """All cases in turn, each at the pace at which it uses an equal share of the time left."""
    repeats = {case: max(1, min(_MOST_REPEATS, int(TRIAL_S / s))) for case, s in first.items()}
    begun = time.perf_counter()
    share = max(0.0, start + budget_s - begun) / len(first)
    used = dict.fromkeys(first, 0.0)
    order = random.Random(0)

    def choose(turn: int) -> list[Case]:
        done = (time.perf_counter() - start) / budget_s
        tell(min(done, 1.0))
        if turn >= LEAST_TRIALS and done >= 1:
            return []
        pace = share * (time.perf_counter() - begun) / max(start + budget_s - begun, 1e-9)
        due = [case for case in used if turn < LEAST_TRIALS or used[case] <= pace]
        return order.sample(due, len(due)) or [min(used, key=lambda case: used[case])]

    turn = 0
    while cases := bench.agree(partial(choose, turn)):
        for case in cases:
            before = time.perf_counter()
            log.seconds.append(_time(bench, layouts, case, turn, repeats[case]))
            log.cases.append(case)
            log.groups.append(_groups(layouts, case, turn))
            used[case] += time.perf_counter() - before
        turn += 1


def _by_curve(bench: Bench, log: _Log) -> dict[CurveKey, dict[int, list[float]]]:
    table: dict[CurveKey, dict[int, list[float]]] = {}
    columns = bench.gather(log.seconds)
    rows = zip(log.cases, log.groups, zip(*columns, strict=True), strict=True)
    for case, groups, row in rows:
        nbytes = message_bytes(case.key.shape.ranks, case.nbytes)
        trials = table.setdefault(case.key, {}).setdefault(nbytes, [])
        trials.append(_of_groups(case.key.collective, groups, row))
    return table


def _of_groups(collective: str, groups: Groups, seconds: Sequence[float | None]) -> float:
    """One trial's time: the mean over the groups, and in each over its ranks.

    Of broadcasts and messages the last rank's: who sends is done as soon as the kernel has taken
    the message, and of a single one, half of the ranks would tell of nothing else.
    """
    rows = [[s for rank in ranks if (s := seconds[rank]) is not None] for ranks in groups]
    one_way = collective in ("broadcast", "send")
    return mean(max(row) if one_way else mean(row) for row in rows)
