"""`measure_problem`: times the operators that plans of a problem run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.passes.tensor_parallel.partition_axis import partition_in_order
from autopar.plan.partition import NodeStrategies
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

GraphStrategies = Mapping[int, tuple[NodeStrategies, ...]]
"""Strategies along each model-parallel axis, by number of micro-batches."""


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
) -> GraphStrategies:
    """Strategies of each graph, solved with a machine or before anything is measured.

    They are taken from rank 0 on live ranks: the solver may find different optima on loaded cores,
    and ranks would time different programs.
    """
    if not needs_machine(problem, live=True) or not problem.strategy.axes:
        return {}
    return {
        count: build_evaluator(problem, graph, machine).setup.op_strategies
        for count, graph in graphs.items()
    }


def measure_problem(
    problem: PlanningProblem,
    graphs: Graphs,
    strategies: GraphStrategies | None = None,
    *,
    live: bool,
    limit_s: float = math.inf,
    known: Machine | None = None,
) -> Machine | None:
    """The machine with operators timed at the shapes of these graphs; None if nothing needs it.

    All live ranks call this at once, with the `strategies_to_replay` of rank 0. Within `limit_s`
    seconds the quickest operators are timed, and others are modelled. A `known` machine, from other
    strategies, only has its operators extended.
    """
    if not needs_machine(problem, live=live):
        return None
    if not live and absent(problem.device, problem.cluster):
        graphs = {}  # every time is modelled
    zero_stages = (0, 3) if problem.dp_size > 1 else (0,)
    in_memory = replace(problem.strategy, offload=None)
    configs = [default_config(in_memory, problem.blocks, stage) for stage in zero_stages]
    if problem.strategy.compress is None:
        methods = [(compression_of(method),) for method in problem.strategy.lossy]
        configs += [replace(config, compress=method) for config in configs for method in methods]
    lowered, nodes, strategies = [], dict[str, fx.Node](), strategies or {}
    for count, graph in graphs.items():
        whole = build_evaluator(problem, graph, None, op_strategies=strategies.get(count)).setup
        setup = replace(whole, micro_batches=count)
        evaluator = SpmdEvaluator(setup)
        lowered += [evaluator.lowered(config) for config in dict.fromkeys(configs)]
        # the solver prices unpartitioned operators too
        for axes in range(len(setup.op_strategies)):
            partial = replace(setup, op_strategies=setup.op_strategies[:axes])
            lowered.append(SpmdEvaluator(partial).lowered(configs[0]))
        if problem.strategy.axes:
            nodes |= _sharded_operators(problem, graph, setup.op_strategies)
    if known is not None:
        machine = time_programs(known, lowered, live=live, limit_s=limit_s)
    else:
        machine = measure_machine(
            lowered,
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
        machine = time_shards(machine, nodes, live=live, limit_s=limit_s)
    return machine


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
