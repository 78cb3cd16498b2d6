"""`runners_up`: the best other configurations of a search, and why each lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from autopar.core.plan.decisions import Decisions, decisions_of
from autopar.core.plan.prediction import RUNNERS_UP, RunnerUp, slower
from autopar.formatting import human_bytes
from autopar.planner.evaluate.candidate import Candidate

MIN_INFEASIBLE = 3
"""Number of runners-up reserved for plans that do not fit."""


def runners_up(
    best: Candidate, candidates: Iterable[Candidate], cap: int | None
) -> tuple[RunnerUp, ...]:
    """The fastest others with programs of their own, with some above `cap` bytes at the end."""
    distinct = {_identity(best): best}
    for candidate in candidates:
        distinct.setdefault(_identity(candidate), candidate)
    others = sorted(
        (each for each in distinct.values() if each is not best), key=attrgetter("step_s")
    )
    fitting = [each for each in others if each.fits(cap)]
    larger = [each for each in others if not each.fits(cap)]
    fitting = fitting[: RUNNERS_UP - min(len(larger), MIN_INFEASIBLE)]
    return tuple(
        RunnerUp.of(each.plan.name, each.prediction, _why_lost(each, best, cap))
        for each in (*fitting, *larger[: RUNNERS_UP - len(fitting)])
    )


def _why_lost(candidate: Candidate, best: Candidate, cap: int | None) -> str:
    if cap is not None and not candidate.fits(cap):
        return f"needs {human_bytes(candidate.needed_bytes - cap)} more than the cap"
    if candidate.step_s <= best.step_s:
        more = candidate.needed_bytes - best.needed_bytes
        return f"as fast, needs {human_bytes(more)} more" if more else "as fast"
    return slower(candidate.prediction, best.prediction)


def _identity(candidate: Candidate) -> Decisions:
    """The decisions of a candidate that determine its program."""
    plan = candidate.plan
    several = len(plan.buckets.gather) > 1 or len(plan.buckets.regather) > 1
    # Plans from few blocks have sizes in the place of buckets: one stands for all sizes.
    return replace(decisions_of(plan), prefetch=plan.prefetch if several else 0, bucket_bytes=())
