"""Plans predicted to be nearly as fast as the best: which are worth a trial, and which won.

A prediction is wrong by some per cent, and that decides between plans that are nearly equal. Where
the ranks are running, a few steps of each tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.plan.prediction import RUNNERS_UP, RunnerUp
from autopar.planner.search.mesh_search import NEAR
from autopar.planner.search.pipeline_search import step_s
from autopar.report.plan import Plan

TRIALS = 6
"""Plans that are tried, unless somebody says how many."""


FAR = 1.6
"""Times as slow as the best a plan may be predicted to be, and still be tried where others are few.

Where ranks outnumber cores, predictions of one cluster's pipelines were up to 1.55 times too fast
(`benchmarks/results/regret-2026-11-22.json`).
"""


def autotune_candidates(
    best: Plan, others: Iterable[Plan], most: int, room: int | None
) -> list[Plan]:
    """The best plan, then others that fit and could be as fast, those least like it first.

    First comes the fastest of each mesh, then of each number of micro-batches on it, then of each
    other kind: what plans have in common they are predicted equally wrongly.

    Args:
        best: as predicted.
        others: that were looked at under the same cap.
        most: plans to return.
        room: bytes that all of them may take together; None for any number.
    """
    cap, found = best.memory_cap, [best]
    fitting = sorted((p for p in others if cap is None or _bytes(p) <= cap), key=step_s)
    for times, likeness in ((NEAR, _mesh), (NEAR, _form), (FAR, _kind)):
        seen = {likeness(plan) for plan in found}
        for plan in fitting:
            if step_s(plan) <= times * step_s(best) and likeness(plan) not in seen:
                seen.add(likeness(plan))
                found.append(plan)
    found = found[:most]
    if room is not None:
        while len(found) > 1 and sum(map(_bytes, found)) > room:
            found.pop()
    return found


def _bytes(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.needed_bytes


def _mesh(plan: Plan) -> tuple[object, ...]:
    """How ranks lie along the axes of the model."""
    axes = ((p.axis, size) for p in plan.partitions for n, size in plan.mesh if n == p.axis)
    return plan.pp_size, plan.model_parallel_size, tuple(axes)


def _form(plan: Plan) -> tuple[object, ...]:
    """The mesh, and into how many parts the rows are cut on it."""
    parts = plan.pipeline.micro_batches if plan.pipeline else 1
    return _mesh(plan), parts


def _kind(plan: Plan) -> tuple[object, ...]:
    """What plans differ in that are more than two sizes of the same buckets."""
    schedule = plan.pipeline and (plan.pipeline.schedule, plan.pipeline.stages_per_rank)
    zero, again = {stage for _, stage in plan.zero_stages}, {level for _, level in plan.recompute}
    by_level = any(own.from_bytes for own in plan.levels)
    methods = frozenset(plan.compressions.reduce)
    zero_over = plan.hybrid, frozenset(zero)
    return _form(plan), schedule, zero_over, frozenset(again), by_level, methods


def with_measured_times(plans: Sequence[Plan], seconds: Sequence[float], rounds: int) -> Plan:
    """The plan whose steps took the least, with what became of the others.

    Args:
        plans: that ran, the first as it was chosen by prediction.
        seconds: of a step of each.
        rounds: steps that the fastest were timed for.
    """
    least = min(seconds)
    best = plans[seconds.index(least)]
    told = [
        f"{plan.name}: {taken * 1e3:.4g} ms (predicted {step_s(plan) * 1e3:.4g})"
        for taken, plan in sorted(zip(seconds, plans, strict=True), key=lambda pair: pair[0])
    ]
    ran = f"{len(plans)} plans that ran for up to {rounds} steps each"
    note = f"the fastest of {ran}: {'; '.join(told)}"
    runners_up = {other.name: other for other in plans[0].runners_up}
    for plan, taken in zip(plans, seconds, strict=True):
        if plan.prediction is not None:
            why = f"{(taken - least) * 1e3:.2f} ms slower in a trial"
            runners_up[plan.name] = RunnerUp.of(plan.name, plan.prediction, why)
    runners_up.pop(best.name)
    kept = sorted(runners_up.values(), key=lambda other: other.step_s)[:RUNNERS_UP]
    notes = dict.fromkeys((*best.notes, *plans[0].notes, note))
    return replace(best, runners_up=tuple(kept), notes=tuple(notes))
