"""`measure_problem`: times the operators that plans of a problem run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.plan.partition import (
    NodeStrategies,
    needs_planned_rows,
    rescale_interleave,
    rows_of,
)
from autopar.passes.tensor_parallel.partition_in_order import partition_in_order
from autopar.planner.evaluate.candidate import (
    compression_of,
    default_config,
    fixed_config,
)
from autopar.planner.evaluate.evaluator import SpmdEvaluator
from autopar.planner.machine import (
    Machine,
    absent,
    measure_machine,
    time_programs,
    time_shards,
)
from autopar.planner.placement.costs import shards_of
from autopar.planner.placement.strategies import strategy_choices
from autopar.planner.problem import Graphs, PlanningProblem
from autopar.planner.search.build_evaluator import build_evaluator


@dataclass(frozen=True)
class SolvedGraph:
    """Strategies along each model-parallel axis of rank 0's graph, which has so many rows."""

    rows: int
    op_strategies: tuple[NodeStrategies, ...]

    def for_rows_of(
        self, graph: TrainingGraph, problem: PlanningProblem
    ) -> tuple[NodeStrategies, ...] | None:
        """The strategies for the rows of a rank's graph; None if they divide rank 0's rows."""
        axes, rows = problem.strategy.axes, rows_of(graph)
        by_axis = dict(zip(axes, self.op_strategies, strict=True))
        if rows == self.rows:
            return self.op_strategies
        fitted: list[NodeStrategies] = []

        def fit(axis: str, before: TrainingGraph) -> NodeStrategies:
            if needs_planned_rows(by_axis[axis], before, self.rows, axes[axis]):
                # A rank that cannot lower rank 0's strategies would not reach the measurement in
                # which the others wait for it, until a timeout of minutes.
                return ()
            fitted.append(rescale_interleave(by_axis[axis], before, self.rows, rows))
            return fitted[-1]

        whole = replace(graph, axes=dict(problem.mesh))
        for _ in partition_in_order(axes, whole, dict.fromkeys(axes, 0), fit):
            pass
        return tuple(fitted) if len(fitted) == len(axes) else None

    @property
    def undivided(self) -> tuple[NodeStrategies, ...]:
        """The strategies with everything whole on every rank, which fit any rows."""
        return ((),) * len(self.op_strategies)


SolvedGraphs = Mapping[int, SolvedGraph]
GraphStrategies = Mapping[int, tuple[NodeStrategies, ...]]
"""Both by number of micro-batches."""


@dataclass(frozen=True)
class Programs:
    """Programs and operators to time."""

    lowered: tuple[TrainingGraph, ...] = ()
    sharded_operators: Mapping[str, fx.Node] = field(default_factory=dict)


def needs_machine(problem: PlanningProblem, *, live: bool) -> bool:
    """Whether the plan depends on measurements.

    A fully fixed strategy needs none, unless the planner must check a cap, choose levels, or
    predict an offline plan on a cluster with curves or links.
    """
    known = problem.cluster
    if not live and known is not None and (known.curves or known.topology is not None):
        return True
    fixed = fixed_config(problem.strategy, problem.blocks) is not None
    by_level = problem.strategy.hierarchical is True and not problem.is_hybrid
    return not fixed or problem.memory is not None or by_level


def strategies_to_replay(
    problem: PlanningProblem, graphs: Graphs, machine: Machine | None = None
) -> SolvedGraphs:
    """Strategies of each graph, solved with a machine or before anything is measured.

    They are taken from rank 0 on live ranks: the solver may find different optima on loaded cores,
    and ranks would time different programs.
    """
    if not needs_machine(problem, live=True) or not problem.strategy.axes:
        return {}
    return {
        count: SolvedGraph(
            rows_of(graph), build_evaluator(problem, graph, machine).setup.op_strategies
        )
        for count, graph in graphs.items()
    }


def programs_to_time(
    problem: PlanningProblem,
    graphs: Graphs,
    strategies: GraphStrategies | None = None,
    *,
    live: bool,
) -> Programs:
    """The programs of a problem, lowered under strategies that are solved for unless given."""
    if not needs_machine(problem, live=live):
        return Programs()
    zero_stages = (0, 3) if problem.replicas > 1 else (0,)
    in_memory = replace(problem.strategy, offload=None)
    configs = [default_config(in_memory, problem.blocks, stage) for stage in zero_stages]
    if problem.strategy.compress is None:
        methods = [(compression_of(method),) for method in problem.strategy.lossy]
        configs += [replace(config, compress=method) for config in configs for method in methods]
    lowered, nodes = list[TrainingGraph](), dict[str, fx.Node]()
    for count, graph in graphs.items():
        op_strategies = (strategies or {}).get(count)
        setup = build_evaluator(problem, graph, None, op_strategies=op_strategies).setup
        # Without the number, the program of one micro-batch keeps sums over the batch, which never
        # run. Its operators could then not be replayed as a step.
        setup = replace(setup, micro_batches=count)
        evaluator = SpmdEvaluator(setup)
        lowered += [evaluator.lowered(config) for config in dict.fromkeys(configs)]
        # the solver prices unpartitioned operators too
        for axes in range(len(setup.op_strategies)):
            partial = replace(setup, op_strategies=setup.op_strategies[:axes])
            lowered.append(SpmdEvaluator(partial).lowered(configs[0]))
        if problem.strategy.axes:
            nodes |= _sharded_operators(problem, graph, setup.op_strategies)
    return Programs(tuple(lowered), nodes)


def measure_programs(
    problem: PlanningProblem,
    programs: Programs,
    *,
    live: bool,
    limit_s: float = math.inf,
    known: Machine | None = None,
) -> Machine | None:
    """The machine with the operators of programs timed; None if nothing needs it.

    All live ranks call this at once, with the same programs but for their rows. Within `limit_s`
    seconds the quickest operators are timed, and others are modelled. A `known` machine, from other
    strategies, only has its operators extended.
    """
    if not needs_machine(problem, live=live):
        return None
    if known is not None:
        machine = time_programs(known, programs.lowered, live=live, limit_s=limit_s)
    else:
        machine = measure_machine(
            programs.lowered,
            problem.device,
            problem.cluster,
            problem.optimizer,
            live=live,
            backend=problem.backend,
            dtype=problem.dtype,
            limit_s=limit_s,
            offload_dir=problem.strategy.offload_dir or "",
            offload=problem.strategy.offloads,
        )
    if problem.strategy.axes and machine.operators.present:
        nodes = programs.sharded_operators
        machine = time_shards(machine, nodes, live=live, limit_s=limit_s)
    return machine


def measure_problem(
    problem: PlanningProblem, graphs: Graphs, *, limit_s: float = math.inf
) -> Machine | None:
    """The machine of an offline problem, with operators timed here where it is this machine."""
    if absent(problem.device, problem.cluster):
        graphs = {}  # every time is modelled
    programs = programs_to_time(problem, graphs, live=False)
    return measure_programs(problem, programs, live=False, limit_s=limit_s)


def _sharded_operators(
    problem: PlanningProblem, graph: TrainingGraph, op_strategies: Sequence[NodeStrategies]
) -> Mapping[str, fx.Node]:
    """The operators worth timing on shards along each axis, by signature."""
    axes = problem.strategy.axes
    solved = dict(zip(axes, op_strategies, strict=True))
    graph, first = replace(graph, axes=dict(problem.mesh)), dict.fromkeys(axes, 0)
    nodes: dict[str, fx.Node] = {}
    for axis, before, _ in partition_in_order(axes, graph, first, lambda axis, _: solved[axis]):
        nodes |= shards_of(strategy_choices(before, axes[axis]).op_strategies, axes[axis])
    return nodes
