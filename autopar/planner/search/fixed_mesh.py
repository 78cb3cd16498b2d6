"""`plan_fixed_mesh`: the fastest plan of a problem whose mesh is fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.errors import OutOfMemoryError
from autopar.planner.evaluate.candidate import (
    Candidate,
    CandidateConfig,
    default_config,
    fixed_config,
)
from autopar.planner.evaluate.evaluator import SpmdEvaluator
from autopar.planner.machine import Machine
from autopar.planner.problem import Graphs, PlanningProblem, SearchContext
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.config_search import search_configs
from autopar.planner.search.pipeline_search import fastest_pipeline, open_pipelines
from autopar.planner.work import work_of

LEANER = "more is divided than were fastest, to fit under the cap"

LEANER_PARTITIONS = (0.75, 0.0)
"""Fractions of the cap that a partition may hold, tried in order if the fastest does not fit."""


def plan_fixed_mesh(
    problem: PlanningProblem,
    graphs: Graphs,
    machine: Machine | None,
    context: SearchContext | None = None,
    first: CandidateConfig | None = None,
) -> Plan:
    """The fastest plan that fits, on rank 0; fully fixed strategies need no machine.

    If `first` fits, perhaps with more recomputation, only its buckets and schedules are tuned.

    Raises:
        OutOfMemoryError: nothing fits.
        StrategyError: the model cannot be split into the strategy's stages.
    """
    if machine is None:
        return _plan_unmeasured(problem, graphs)
    context = context or SearchContext()
    cluster, strategy = machine.cluster, problem.strategy
    cap = problem.cap_on(cluster)

    def finish(plan: Plan) -> Plan:
        origin = f"{cluster.name} ({cluster.provenance})"
        notes = (*plan.notes, *problem.memory_notes(cluster))
        plan = replace(plan, memory_cap=cap, cluster=origin, notes=notes)
        if plan.prediction is None:
            return plan
        count = plan.pipeline.micro_batches if plan.pipeline is not None else 1
        dtype = problem.precision or str(problem.dtype).removeprefix("torch.")
        work = work_of(graphs[count], count * plan.dp_size, cluster, dtype)
        return replace(plan, prediction=replace(plan.prediction, work=work))

    observe = context.on_candidate
    if observe is not None:
        context = replace(context, on_candidate=lambda plan: observe(finish(plan)))
    if strategy.pipelined:

        def find(memory: int | None) -> Candidate:
            evaluators = {
                count: build_evaluator(problem, graph, machine, context, memory=memory)
                for count, graph in graphs.items()
            }
            return fastest_pipeline(evaluators, strategy, cap, context.incumbent_s, first)

        return finish(else_leaner(strategy, find).plan)
    return finish(_plan_unpipelined(problem, graphs[1], machine, context, first))


def else_leaner(strategy: Strategy, find: Callable[[int | None], Candidate]) -> Candidate:
    """The candidate with the fastest partition, else with that of the fewest bytes.

    `find` finds the best with a partition that holds at most some bytes.

    Raises:
        OutOfMemoryError: nothing fits.
    """
    try:
        return find(None)
    except OutOfMemoryError:
        if not strategy.axes:
            raise
        # Nothing fits in 0 bytes, and the integer program then minimises bytes instead of time.
        leaner = find(0)
    return leaner.with_plan(notes=(*leaner.plan.notes, LEANER))


def _plan_unmeasured(problem: PlanningProblem, graphs: Graphs) -> Plan:
    """The plan of a fully fixed strategy, without a prediction."""
    config = fixed_config(problem.strategy, problem.blocks)
    assert config is not None
    ((count, graph),) = graphs.items()
    evaluator = build_evaluator(problem, graph, None)
    if not problem.strategy.pipelined:
        return evaluator.plan(config)
    kind = problem.device.type  # modelled times suffice to balance stages
    cluster = problem.cluster or Cluster.default(problem.world_size, kind)
    operators = replace(OperatorTimes.load(kind), times={}, alone={})
    modelled = SpmdEvaluator(replace(evaluator.setup, cluster=cluster, operators=operators))
    return next(open_pipelines(modelled, problem.strategy, count)).plan(config)


def _plan_unpipelined(
    problem: PlanningProblem,
    graph: TrainingGraph,
    machine: Machine,
    context: SearchContext,
    first: CandidateConfig | None,
) -> Plan:
    """The fastest plan that fits: with the fastest partition, else with leaner ones."""
    fastest = build_evaluator(problem, graph, machine, context)
    cap = problem.cap_on(machine.cluster)
    evaluators = _from_the_fastest(fastest, problem, graph, machine, context)
    best = search_configs(evaluators, problem.strategy, cap, context.incumbent_s, first).plan
    same = _divisions(best) == _divisions(fastest.setup.base)
    return best if same else replace(best, notes=(*best.notes, LEANER))


def _from_the_fastest(
    fastest: SpmdEvaluator,
    problem: PlanningProblem,
    graph: TrainingGraph,
    machine: Machine,
    context: SearchContext,
) -> Iterator[SpmdEvaluator]:
    """The evaluator with the fastest partition, then with leaner ones if need be.

    A leaner partition takes long to solve, so it is solved once the search has come to it.
    """
    yield fastest
    strategy, cap = problem.strategy, problem.cap_on(machine.cluster)
    plain = default_config(strategy, problem.blocks, 0)  # neither ZeRO nor recomputation
    if strategy.axes and cap is not None and fastest.evaluate(plain).needed_bytes > cap:
        for share in LEANER_PARTITIONS:
            yield build_evaluator(problem, graph, machine, context, memory=int(cap * share))


def _divisions(plan: Plan) -> list[object]:
    """Placements and strategies along each axis, without the sizes of buckets."""
    return [(own.axis, own.parameters, own.strategies) for own in plan.partitions]
