"""Timing of many collectives in rounds, within a budget of seconds.

All cases are timed in turn, in another order each round, because a machine is noisier over seconds
than over milliseconds. A trial repeats a short collective for `TRIAL_S`, so that its mean has the
jitter of a step. The median over the trials removes outliers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean

import torch

from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.measurement.bench import Bench, message_bytes
from autopar.cost_model.measurement.group_layouts import MAX_GROUPS, Groups

TRIAL_S = 0.02
"""Seconds of one trial of a short collective."""

LEAST_TRIALS = 3
_MOST_REPEATS = 50
_TRIES = 3

Layouts = Mapping[CurveKey, Sequence[Groups]]
"""Layouts of each curve's groups over the ranks; trials use them in turn."""

ReportProgress = Callable[[float], None]
"""Is called with the finished share of the work, 0 to 1, on rank 0."""


@dataclass(frozen=True)
class Case:
    """A collective over groups of one shape, of about `nbytes` bytes."""

    key: CurveKey
    nbytes: int


_Trial = tuple[Case, Groups, float | None]
"""Case, groups, and this rank's seconds; None if it took no part."""


Samples = dict[CurveKey, dict[int, list[float]]]
"""Seconds of each trial, by curve and approximate message size in bytes."""


def sample_in_turn(
    bench: Bench,
    layouts: Layouts,
    sizes: Sequence[int],
    budget_s: float,
    progress: ReportProgress,
) -> Samples:
    """Samples of all curves, with at most `MAX_GROUPS` groups at a time. Every rank calls it."""
    table: Samples = {}
    for part in _parts(layouts, together=bench.device.type == "cpu"):
        done = len(table) / len(layouts)
        share = len(part) / len(layouts)

        def tell(fraction: float, done: float = done, share: float = share) -> None:
            progress(done + share * fraction)

        table |= sample(bench, part, sizes, share * budget_s, tell)
        bench.release()
    return table


def _parts(layouts: Layouts, *, together: bool) -> list[dict[CurveKey, Sequence[Groups]]]:
    """The curves in parts with at most `MAX_GROUPS` groups, or one shape, each.

    Groups of a GPU take much of its memory, so shapes are not measured `together` there.
    """
    by_shape: dict[tuple[int, int], dict[CurveKey, Sequence[Groups]]] = {}
    for key, several in sorted(layouts.items(), key=lambda item: item[0].shape):
        shape = key.shape.ranks, key.shape.ranks_per_node
        by_shape.setdefault(shape, {})[key] = several
    parts: list[dict[CurveKey, Sequence[Groups]]] = []
    existing: set[tuple[int, ...]] = set()
    for alike in by_shape.values():
        needed = {ranks for several in alike.values() for groups in several for ranks in groups}
        if not (parts and together) or len(existing | needed) > MAX_GROUPS:
            parts.append({})
            existing = set()
        parts[-1] |= alike
        existing |= needed
    return parts


def sample(
    bench: Bench,
    layouts: Layouts,
    sizes: Sequence[int],
    budget_s: float,
    progress: ReportProgress,
) -> Samples:
    """Samples of curves whose groups exist at once. Every rank calls it.

    Sizes, which ascend, are left out where they exceed a curve's share of the budget.
    """
    start = time.perf_counter()
    first = _first_times(bench, layouts, sizes, budget_s)
    trials = _rounds(bench, layouts, first, start, budget_s, progress)
    table: Samples = {}
    columns = bench.gather([seconds for *_, seconds in trials])
    for (case, groups, _), row in zip(trials, zip(*columns, strict=True), strict=True):
        nbytes = message_bytes(case.key.shape.ranks, case.nbytes)
        times = table.setdefault(case.key, {}).setdefault(nbytes, [])
        times.append(_trial_seconds(case.key.collective, groups, row))
    return table


def _groups(layouts: Layouts, case: Case, turn: int) -> Groups:
    return layouts[case.key][turn % len(layouts[case.key])]


def _time(bench: Bench, layouts: Layouts, case: Case, turn: int, repeats: int) -> float | None:
    dtype = getattr(torch, case.key.dtype)
    groups = _groups(layouts, case, turn)
    return bench.time(case.key.collective, groups, case.nbytes, repeats, dtype)


def _first_times(
    bench: Bench, layouts: Layouts, sizes: Sequence[int], budget_s: float
) -> dict[Case, float]:
    """Approximate seconds of every case, by growing size until a curve becomes too slow."""
    share = budget_s / len(layouts)
    for key, alternatives in layouts.items():
        for turn in range(len(alternatives)):
            _time(bench, layouts, Case(key, sizes[0]), turn, 1)  # connects the ranks
    times: dict[Case, float] = {}
    growing = list(layouts)
    for size, larger in zip(sizes, [*sizes[1:], 0], strict=True):
        slow = cases = [Case(key, size) for key in growing]
        for _ in range(_TRIES):  # a case that was delayed once is not slow
            for case in slow:
                seconds = _time(bench, layouts, case, 0, 2)
                if seconds is not None:
                    times[case] = min(seconds, times.get(case, seconds))
            slow = bench.agree(partial(_too_slow, times, cases, larger, share))
        growing = [case.key for case in cases if case not in slow]
    return bench.agree(lambda: times)


def _too_slow(
    times: Mapping[Case, float], cases: Sequence[Case], larger: int, share: float
) -> list[Case]:
    """Cases whose next size, `larger`, does not fit in their share of the budget."""
    limit = share / 8  # growing then takes a third of the share, three trials of each size a half
    return [case for case in cases if times[case] * larger / case.nbytes >= limit]


def _rounds(
    bench: Bench,
    layouts: Layouts,
    first: Mapping[Case, float],
    start: float,
    budget_s: float,
    progress: ReportProgress,
) -> list[_Trial]:
    """Trials of all cases in turn, each case at the pace of an equal share of the time left."""
    repeats = {case: max(1, min(_MOST_REPEATS, int(TRIAL_S / s))) for case, s in first.items()}
    begin = time.perf_counter()
    share = max(0.0, start + budget_s - begin) / len(first)
    used = dict.fromkeys(first, 0.0)
    order = random.Random(0)

    def choose(turn: int) -> list[Case]:
        done = (time.perf_counter() - start) / budget_s
        progress(min(done, 1.0))
        if turn >= LEAST_TRIALS and done >= 1:
            return []
        pace = share * (time.perf_counter() - begin) / max(start + budget_s - begin, 1e-9)
        due = [case for case in used if turn < LEAST_TRIALS or used[case] <= pace]
        return order.sample(due, len(due)) or [min(used, key=lambda case: used[case])]

    turn, trials = 0, list[_Trial]()
    while cases := bench.agree(partial(choose, turn)):
        for case in cases:
            before = time.perf_counter()
            seconds = _time(bench, layouts, case, turn, repeats[case])
            trials.append((case, _groups(layouts, case, turn), seconds))
            used[case] += time.perf_counter() - before
        turn += 1
    return trials


def _trial_seconds(collective: str, groups: Groups, seconds: Sequence[float | None]) -> float:
    """One trial's time: the mean over the groups, and over the ranks of each.

    Of broadcasts and sends the last rank counts: a sender is done as soon as the kernel has
    accepted the message.
    """
    rows = [[s for rank in ranks if (s := seconds[rank]) is not None] for ranks in groups]
    one_way = collective in ("broadcast", "send")
    return mean(max(row) if one_way else mean(row) for row in rows)
