"""`verdict_lines`: the gain over usual layouts, and the proven bound of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from typing import TYPE_CHECKING

from autopar.core.plan.prediction import RunnerUp
from autopar.core.plan.search_outcome import ALWAYS_NAMED
from autopar.core.plan.strategy import MESH, UNUSED
from autopar.formatting import duration

if TYPE_CHECKING:
    from autopar.core.plan.plan import Plan
    from autopar.core.plan.search_outcome import PracticePlan, SearchOutcome

EQUAL = 0.005
"""Relative difference of two predicted steps that counts as none."""

LOOSE = 0.5
"""Gap to a bound above which the bound says nothing about the plan."""


def verdict_lines(plan: Plan) -> Iterator[str]:
    """Lines on the outcome of the search behind a plan."""
    found, cost = plan.search, plan.prediction
    if found is None or cost is None:
        return
    yield f"verdict: {verdict(plan, found, cost.step_s)}"
    if others := other_layouts(found):
        yield f"other usual layouts: {practised(others, cost.step_s)}"
    if found.looked:
        yield _extent(found.looked, found.left_out, found.complete) + _bound(plan)


def verdict(plan: Plan, found: SearchOutcome, step_s: float) -> str:
    """A plan of a step in seconds beside DDP, FSDP and Megatron's layout."""
    if few := enough(plan):
        return few
    if named := [own for own in found.practice if own.name in ALWAYS_NAMED]:
        return f"by prediction {practised(named, step_s)}"
    if (gain := found.gain(step_s)) is None:
        return without_baseline(found)
    best = f"{found.baseline}: {duration(found.baseline_s)}"
    return f"{compared(gain)} {baselines(found)} ({best}), by prediction"


def other_layouts(found: SearchOutcome) -> list[PracticePlan]:
    """Usual layouts beside those that a verdict compares with."""
    return [own for own in found.practice if own.name not in ALWAYS_NAMED]


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


def practised(layouts: Iterable[PracticePlan], step_s: float) -> str:
    """A step in seconds beside those of usual layouts, or the reason why one has no plan."""
    return "; ".join(
        f"{compared(own.step_s / step_s - 1.0)} {own.name} ({duration(own.step_s)})"
        if own.plan
        else f"no {own.name}: {own.why}"
        for own in layouts
    )


def usual_layouts(plan: Plan) -> Iterator[RunnerUp]:
    """Usual layouts that have a price, as alternatives to a predicted plan, by their plans."""
    assert plan.prediction is not None
    for own in plan.search.practice if plan.search is not None else ():
        if own.plan:
            why = f"{compared(plan.prediction.step_s / own.step_s - 1.0)} the plan"
            yield RunnerUp(own.plan, own.step_s, own.needed_bytes, why, own.needed_bytes)


def unpriced_layouts(plan: Plan) -> dict[str, str]:
    """The reason why a usual layout has no price, by its name."""
    practice = plan.search.practice if plan.search is not None else ()
    return {own.name: own.why for own in practice if not own.plan}


def usual_names(plan: Plan) -> dict[str, str]:
    """Usual names of plans that have some."""
    names = defaultdict[str, list[str]](list)
    for own in plan.search.practice if plan.search is not None else ():
        if own.plan:
            names[own.plan].append(own.name)
    return {name: ", ".join(labels) for name, labels in names.items()}


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
