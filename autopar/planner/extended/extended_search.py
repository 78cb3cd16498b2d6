"""`plan_extended`: the fastest plan of a fixed mesh, with every kind of block lowered once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autopar.core.plan.pipeline import Pipeline
from autopar.planner.evaluate.candidate import Candidate
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.extended.default_pipelines import MORE, default_pipelines
from autopar.planner.extended.extended_evaluator import ExtendedEvaluator, ReducedEvaluator
from autopar.planner.extended.reduced_models import ReducedModel, ReducedModels
from autopar.planner.extended.whole_setup import reduced_work, whole_setup, whole_table
from autopar.planner.machine import Machine
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.config_search import search_configs
from autopar.planner.search.fixed_mesh import else_leaner
from autopar.planner.search.pipeline_search import best_pipeline, open_pipelines


def can_extend(problem: PlanningProblem, models: ReducedModels) -> bool:
    """Whether the plan of a problem follows from few blocks.

    It has the same ZeRO stages for blocks of a kind, and compresses no bucket. Stages are equal
    ranks' runs of blocks of one kind, more of them than the reduced models have.
    """
    strategy = problem.strategy
    # Compression is chosen bucket by bucket, and few blocks give sizes of buckets only.
    lossy = any(way not in (None, "none") for way in (strategy.compress, strategy.compress_gathers))
    if isinstance(strategy.zero, Mapping) or lossy or not models.kinds:
        return False
    if strategy.stages == 1:
        return True
    several = len(models.kinds) == 1 and len(models.kinds[0]) >= max(MORE + 1, strategy.stages)
    return several and strategy.split_points is None and not problem.stage_paces


def plan_extended(
    problem: PlanningProblem, models: ReducedModels, machine: Machine, context: SearchContext
) -> Candidate:
    """The fastest plan that fits, by arithmetic from reduced models.

    Collectives are not scheduled one by one but prefetched, and gradients are not compressed.

    Raises:
        OutOfMemoryError: nothing fits.
    """
    cap = problem.cap_on(machine.cluster)
    # A schedule places each collective of the whole model, and few blocks do not have them all.
    strategy = replace(problem.strategy, prefetch=problem.strategy.prefetch or 1)
    unscheduled = problem.strategy.prefetch is None

    def find(memory: int | None) -> Candidate:
        if strategy.stages > 1:
            tried = [*default_pipelines(problem, models, machine, context, memory)]
            return best_pipeline(tried, strategy, cap, context.incumbent_s, unscheduled=unscheduled)
        evaluator = extended_evaluator(problem, models, machine, context, memory)
        return search_configs(
            [evaluator], strategy, cap, context.incumbent_s, unscheduled=unscheduled
        )

    first = math.isinf(context.incumbent_s)  # others are not worth a second partition
    best = else_leaner(strategy, find) if first else find(None)
    origin = f"{machine.cluster.name} ({machine.cluster.provenance})"
    notes = (*best.plan.notes, *problem.memory_notes(machine.cluster))
    return best.with_plan(memory_cap=cap, cluster=origin, notes=notes)


def extended_evaluator(
    problem: PlanningProblem,
    models: ReducedModels,
    machine: Machine,
    context: SearchContext,
    memory: int | None = None,
) -> ExtendedEvaluator:
    """The evaluator of the whole model, with the partition of the reduced ones.

    These hold at most `memory` bytes, or the fewest that they can.
    """
    count = problem.strategy.micro_batches or 1
    solved = models.solved if memory is None else models.leanest[problem.shard_ranks]
    # Candidates of a reduced model are no plans of the whole one, so observers must not see them.
    quiet = replace(context, baseline=None, on_candidate=None)
    reduced, evaluators = [], []
    for layers, times in models.samples.items():
        model = models.get(layers, problem.dp_size, count)
        few = replace(problem, parameters=model.parameters)
        evaluator: Evaluator = build_evaluator(
            few, model.graph, machine, quiet, memory=memory, carried=solved, reports=False
        )
        if problem.strategy.pipelined:
            evaluator = next(open_pipelines(evaluator, problem.strategy, count))
        evaluators.append(evaluator)
        work = reduced_work(problem, model.graph, count, machine)
        reduced.append(ReducedEvaluator(evaluator, model.blocks, work, times))
    first = models.get(models.fewest, problem.dp_size, count)
    setup = evaluators[0].setup
    whole = whole_setup(problem, models, first, setup, context)
    pipeline = _whole_pipeline(models, first, setup.base.pipeline)
    whole = replace(whole, base=replace(whole.base, pipeline=pipeline))
    return ExtendedEvaluator(whole, models.kinds, reduced)


def _whole_pipeline(
    models: ReducedModels, reduced: ReducedModel, own: Pipeline | None
) -> Pipeline | None:
    if own is None:
        return None
    return replace(own, uses=tuple(whole_table(models, reduced, own.uses)))  # type: ignore[arg-type]
