"""`verdict_lines`: the gain over torch's data parallelism, and the proven bound of a search."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from autopar.core.plan.strategy import MESH, UNUSED
from autopar.formatting import duration

if TYPE_CHECKING:
    from autopar.core.plan.plan import Plan
    from autopar.core.plan.search_outcome import SearchOutcome

EQUAL = 0.005
"""Relative difference of two predicted steps that counts as none."""

LOOSE = 0.5
"""Gap to a bound above which the bound says nothing about the plan."""


def verdict_lines(plan: Plan) -> Iterator[str]:
    """Lines on the outcome of the search behind a plan."""
    found, cost = plan.search, plan.prediction
    if found is None or cost is None:
        return
    gain = found.gain(cost.step_s)
    if few := enough(plan):
        yield f"verdict: {few}"
    elif gain is None:
        yield f"verdict: {without_baseline(found)}"
    else:
        best = f"{found.baseline}: {duration(found.baseline_s)}"
        than = f"{compared(gain)} {baselines(found)}"
        yield f"verdict: {than} ({best}), by prediction"
    if found.practice:
        yield f"usual layouts: {practised(found, cost.step_s)}"
    if found.looked:
        yield _extent(found.looked, found.left_out, found.complete) + _bound(plan)


def enough(plan: Plan) -> str:
    """The number of ranks that are enough where others repeat their work, in words; else empty."""
    unused = {axis for axis in MESH if UNUSED.format(axis) in plan.notes}
    ranks = prod(size for axis, size in plan.mesh if axis not in unused)
    if ranks == plan.world_size:
        return ""
    few = "one device is" if ranks == 1 else f"{ranks} devices are"
    return f"{few} enough: the others repeat their work, and save no time or memory"


def baselines(found: SearchOutcome) -> str:
    """The kinds of torch's data parallelism that were predicted, in words."""
    if bool(found.ddp) == bool(found.fsdp):
        return "the best of DDP and fully_shard"
    return "DDP" if found.ddp else "fully_shard"


def without_baseline(found: SearchOutcome) -> str:
    """The reason why a plan is compared with no plan of torch's data parallelism."""
    if found.ddp or found.fsdp:
        return "neither DDP nor fully_shard was found to fit"
    return "DDP and fully_shard were not predicted"


def practised(found: SearchOutcome, step_s: float) -> str:
    """Steps of usual layouts beside a step in seconds, or the reason why one has no plan."""
    return "; ".join(
        f"{own.name} {duration(own.step_s)} ({compared(step_s / own.step_s - 1.0)} this plan)"
        if own.plan
        else f"{own.name}: {own.why}"
        for own in found.practice
    )


def compared(gain: float) -> str:
    """A relative speed in words, such as "2.0% faster than"."""
    if abs(gain) < EQUAL:
        return "as fast as"
    return f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'} than"


def _extent(looked: int, left_out: int, complete: bool) -> str:
    over = "" if complete else "time ran out: "
    meshes = "1 mesh" if looked == 1 else f"{looked} meshes"
    return f"{over}planned {meshes} with their micro-batches, left out {left_out}"


def _bound(plan: Plan) -> str:
    assert plan.search is not None
    assert plan.prediction is not None
    if not plan.search.bound_s:
        return "; no bound is proven"
    gap = plan.search.gap(plan.prediction.step_s)
    if gap > LOOSE:
        return "; the search stopped early, and a better plan may exist: raise --time-limit"
    return f"; no plan takes less than {duration(plan.search.bound_s)}, so the gap is {gap:.1%}"
