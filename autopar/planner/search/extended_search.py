"""`plan_extended`: the fastest plan of a fixed mesh, with every kind of block lowered once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.partition import Partition
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.prediction import Work
from autopar.core.plan.strategy import Strategy
from autopar.planner.evaluate.candidate import Candidate
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.evaluate.extended_evaluator import ExtendedEvaluator, ReducedEvaluator
from autopar.planner.machine import Machine
from autopar.planner.problem import PlanningProblem, SearchContext
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.config_search import search_configs
from autopar.planner.search.fixed_mesh import else_leaner
from autopar.planner.search.pipeline_search import open_pipelines
from autopar.planner.search.reduced_models import ReducedModel, ReducedModels
from autopar.planner.work import work_of


def can_extend(strategy: Strategy) -> bool:
    """Whether the plan of a strategy follows from few blocks.

    It has one stage, the same ZeRO stages for blocks of a kind, and compresses no bucket.
    """
    # Compression is chosen bucket by bucket, and few blocks give sizes of buckets only.
    lossy = any(way not in (None, "none") for way in (strategy.compress, strategy.compress_gathers))
    return strategy.stages == 1 and not isinstance(strategy.zero, Mapping) and not lossy


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
            few, model.graph, machine, quiet, memory=memory, carried=solved
        )
        if problem.strategy.pipelined:
            evaluator = next(open_pipelines(evaluator, problem.strategy, count))
        evaluators.append(evaluator)
        work = _work(problem, model.graph, count, machine)
        reduced.append(ReducedEvaluator(evaluator, model.blocks, work, times))
    first = models.get(models.fewest, problem.dp_size, count)
    setup, base = evaluators[0].setup, problem.base()
    own = setup.base
    changed = tuple(name for one in own.changed for name in _names(models, first, one))
    base = replace(
        base,
        levels=own.levels,
        changed=changed,
        partitions=tuple(_whole_partition(models, first, each) for each in own.partitions),
        pipeline=_whole_pipeline(models, first, own.pipeline),
        notes=own.notes,
    )
    kept = {name: info for name, info in problem.parameters.items() if name not in changed}
    whole = replace(
        setup,
        graph=replace(first.graph, parameters=kept),
        parameters=problem.parameters,
        base=base,
        op_strategies=(),
        note=context.note,
        deadline=context.deadline,
    )
    return ExtendedEvaluator(whole, models.kinds, reduced)


def _work(problem: PlanningProblem, graph: TrainingGraph, count: int, machine: Machine) -> Work:
    dtype = problem.precision or str(problem.dtype).removeprefix("torch.")
    return work_of(graph, count * problem.dp_size, machine.cluster, dtype)


def _names(models: ReducedModels, reduced: ReducedModel, name: str) -> Iterator[str]:
    """Parameters of the whole model that a parameter of the reduced one stands for.

    The last kept block of a kind stands for all that are left out.
    """
    own = reduced.names[name]
    yield own
    block = reduced.blocks[reduced.parameters[name].block]
    alike = models.alike(block)
    kept = [each for each in alike if each in reduced.blocks.values()]
    if len(alike) > len(kept) and block == kept[-1]:
        for other in alike[len(kept) :]:
            yield other + own.removeprefix(block)


def _table(
    models: ReducedModels, reduced: ReducedModel, items: Sequence[tuple[str, object]]
) -> Iterator[tuple[str, object]]:
    for name, value in items:
        for whole in _names(models, reduced, name):
            yield whole, value


def _whole_partition(models: ReducedModels, reduced: ReducedModel, own: Partition) -> Partition:
    """Placements of all parameters; ranks find the strategies of operators that fit them."""
    parameters = tuple(_table(models, reduced, own.parameters))
    return replace(own, parameters=parameters, graph="", rows=0, strategies=())  # type: ignore[arg-type]


def _whole_pipeline(
    models: ReducedModels, reduced: ReducedModel, own: Pipeline | None
) -> Pipeline | None:
    if own is None:
        return None
    return replace(own, uses=tuple(_table(models, reduced, own.uses)))  # type: ignore[arg-type]
