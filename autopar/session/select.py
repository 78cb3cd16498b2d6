"""`select_plans`: plans to benchmark. `with_measured_times`: the plan that won.

Predictions err by several per cent, so they cannot rank plans with nearly equal step times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar._torch import pytree
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import RUNNERS_UP, RunnerUp
from autopar.cost_model.memory.optimizer_memory import Optimizer
from autopar.formatting import duration
from autopar.planner.machine import ranks_of
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.mesh_search import AUTOTUNE_MARGIN
from autopar.planner.search.pipeline_search import step_s
from autopar.runtime.agreement.consensus import broadcast_from_rank0, is_multi_rank
from autopar.runtime.module import DistributedModule
from autopar.session.race import Trial, benchmark_plans, memory_budget

NUM_PLANS = 6
"""Default number of plans to benchmark."""

FEATURE_MARGIN = 1.6
"""Maximum ratio to the best predicted step time for benchmarking a plan with other features.

If ranks outnumber cores, step times of pipelines are underestimated by up to 1.55 times
(`benchmarks/results/regret/regret-2026-11-22.json`).
"""

TIE = 1.03
"""Maximum ratio of step times of plans that tie.

On a shared machine such a difference in a trial says little of the training after it.
"""

TIED = "as fast in a trial, with more pipeline stages or tensor-parallel ranks"


def select_plans(best: Plan, others: Iterable[Plan], count: int, budget: int | None) -> list[Plan]:
    """The best plan, then others that fit and could be as fast, least similar ones first.

    The fastest plan of each mesh comes first, then of each number of micro-batches, then of each
    set of features. Predictions of similar plans have similar errors.

    Args:
        best: the plan with the best prediction.
        others: further candidates under the same cap.
        count: maximum number of plans to return.
        budget: total bytes available to all plans; None for no limit.
    """
    cap, found = best.memory_cap, [best]
    fitting = sorted((p for p in others if cap is None or _bytes(p) <= cap), key=step_s)
    for margin, key in (
        (AUTOTUNE_MARGIN, _mesh),
        (AUTOTUNE_MARGIN, _micro_batches),
        (FEATURE_MARGIN, _features),
    ):
        seen = {key(plan) for plan in found}
        for plan in fitting:
            if step_s(plan) <= margin * step_s(best) and key(plan) not in seen:
                seen.add(key(plan))
                found.append(plan)
    found = found[:count]
    while budget is not None and len(found) > 1 and sum(map(_bytes, found)) > budget:
        found.pop()
    return found


def _bytes(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.needed_bytes


def _mesh(plan: Plan) -> tuple[object, ...]:
    axes = ((p.axis, size) for p in plan.partitions for name, size in plan.mesh if name == p.axis)
    return plan.pp_size, plan.model_parallel_size, tuple(axes)


def _micro_batches(plan: Plan) -> tuple[object, ...]:
    return _mesh(plan), plan.pipeline.micro_batches if plan.pipeline else 1


def _features(plan: Plan) -> tuple[object, ...]:
    """All choices except bucket sizes."""
    schedule = plan.pipeline and (plan.pipeline.schedule, plan.pipeline.stages_per_rank)
    return (
        _micro_batches(plan),
        schedule,
        (plan.hybrid, frozenset(stage for _, stage in plan.zero_stages)),
        frozenset(level for _, level in plan.recompute),
        any(level.from_bytes for level in plan.levels),
        frozenset(plan.compressions.reduce),
    )


def with_measured_times(trial: Trial) -> Plan:
    """The plan with the shortest measured step, with the others as runners-up.

    Of plans that tie with it, the plan with the fewest pipeline stages and tensor-parallel ranks
    wins.
    """
    plans, seconds, rounds = trial.plans, trial.seconds, trial.rounds
    least = min(seconds)
    tied = [i for i, measured in enumerate(seconds) if measured <= TIE * least]
    chosen = min(tied, key=lambda i: (_splits(plans[i]), seconds[i]))
    best, chosen_s = plans[chosen], seconds[chosen]
    times = [
        f"{plan.name}: {duration(measured)} (predicted {duration(step_s(plan))})"
        for measured, plan in sorted(zip(seconds, plans, strict=True), key=lambda pair: pair[0])
    ]
    ran = f"{len(plans)} plans that ran for up to {rounds} steps each"
    place = "the fastest" if chosen_s == least else "as fast as the fastest"
    note = f"{place} of {ran}: {'; '.join(times)}"
    runners_up = {other.name: other for other in plans[0].runners_up}
    for plan, measured in zip(plans, seconds, strict=True):
        if plan.prediction is not None:
            more = measured - chosen_s
            why = f"{duration(more)} slower in a trial" if more >= 0 else TIED
            runners_up[plan.name] = RunnerUp.of(plan.name, plan.prediction, why)
    runners_up.pop(best.name)
    fastest = sorted(runners_up.values(), key=lambda other: other.step_s)[:RUNNERS_UP]
    notes = dict.fromkeys((*best.notes, *plans[0].notes, note))
    return replace(best, runners_up=tuple(fastest), notes=tuple(notes))


def _splits(plan: Plan) -> int:
    """Number of ranks that one copy of the model is split over."""
    return plan.pp_size * plan.model_parallel_size


def num_plans_to_benchmark(trials: int | None, problem: PlanningProblem) -> int:
    """Number of plans to benchmark: `trials`, or a default if the mesh is searched."""
    if not is_multi_rank():
        return 0
    searched = problem.world_size > 1 and bool(problem.strategy.search)
    return NUM_PLANS * searched if trials is None else trials


def plans_to_benchmark(
    device: torch.device, best: Plan, candidates: Iterable[Plan], count: int
) -> list[Plan]:
    """The plan with the best prediction, and at most `count - 1` others worth a benchmark."""
    if count <= 1 or best.prediction is None:
        return [best]
    budget = memory_budget(device, ranks_of(live=True).sharing)
    return broadcast_from_rank0(lambda: select_plans(best, candidates, count, budget))


def benchmark_and_pick(
    module: DistributedModule, plans: Sequence[Plan], call: Any, optimizer: Optimizer
) -> Plan:
    """The plan with the shortest measured step; a single plan is returned unchanged.

    Its notes tell the plans that ran out of memory. Arguments without values are zeros.
    """
    if len(plans) == 1:
        return plans[0]
    device = module._context.device
    args, kwargs = pytree.tree_map(lambda x: _with_values(x, device), call)
    trial = benchmark_plans(module.copy_with_plan, plans, args, kwargs, optimizer)
    best = trial.plans[0]
    if trial.seconds:
        best = with_measured_times(trial)
    return replace(best, notes=(*best.notes, *trial.notes))


def _with_values(leaf: Any, device: torch.device) -> Any:
    is_meta = isinstance(leaf, torch.Tensor) and leaf.is_meta
    return torch.zeros_like(leaf, device=device) if is_meta else leaf
