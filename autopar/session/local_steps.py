"""`build_groups` and `with_local_steps`: groups of ranks that take local steps, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.core.plan.layout import Layout
from autopar.core.plan.outer import LocalSteps, PlannedSteps
from autopar.core.plan.plan import Plan
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.group_shape import GroupShape
from autopar.errors import AutoparError, StrategyError
from autopar.formatting import duration
from autopar.options import CompileOptions
from autopar.planner.problem import PlanningProblem
from autopar.runtime.local_steps.average import INT8_BLOCK
from autopar.runtime.local_steps.groups import Groups, group_size
from autopar.runtime.local_steps.module import LocalStepsModule
from autopar.runtime.module import DistributedModule
from autopar.session.build_module import build_module

WIRE_RATIO = {None: 1.0, "bf16": 0.5, "int8": 0.25 * (1 + 4 / INT8_BLOCK)}
"""Bytes of a message over those of float32, by compression; int8 has a scale for each block."""


def build_groups(
    model: nn.Module,
    options: CompileOptions,
    local: LocalSteps,
    group_ranks: int | None,
    ranks: int,
    device: torch.device,
) -> DistributedModule:
    """A module whose groups of ranks take local steps; None for the groups of the strategy.

    Raises:
        StrategyError: there is one group only, or the training is to be verified.
    """
    if options.verify:
        raise StrategyError(
            "verify compares with one device, and local steps train otherwise: leave verify out"
        )
    fixed, cluster = options.fixed, options.cluster
    groups = Groups.of(local, group_ranks or group_size(fixed, ranks), ranks, device)
    options = replace(
        options,
        strategy=replace(fixed, sync_every=None, outer=None, dp_shard=None, may_sync=()),
        lossy=False,
        cluster=cluster and part_of(cluster, groups.size),
    )
    with groups.as_world():
        kind = partial(LocalStepsModule.of, local, groups)
        module: Any = build_module(model, options, device, groups.size, kind)
    module.start_rounds()
    return module


def with_local_steps(
    plan: Plan, problem: PlanningProblem, plan_group: Callable[[PlanningProblem, int], Plan]
) -> Plan:
    """The plan, or that of a group under the fastest allowed local steps if these are faster.

    `plan_group` plans a problem for one of so many groups.
    """
    cluster, together = problem.cluster, plan.prediction
    size = _group_size(problem)
    if cluster is None or together is None or size is None:
        return plan
    strategy = replace(problem.strategy, may_sync=(), dp_shard=None)
    own = replace(problem, world_size=size, strategy=strategy, cluster=part_of(cluster, size))
    groups = problem.world_size // size
    try:
        apart = plan_group(own, groups)
    except (AutoparError, MemoryError):  # does not fit, or has too few rows
        return plan
    if apart.prediction is None:
        return plan
    ways = [LocalSteps.of(text) for text in problem.strategy.may_sync]
    planned = [PlannedSteps(way, groups, round_s(way, apart, groups, cluster)) for way in ways]
    best = min(planned, key=lambda each: _step_s(apart, each))
    step_s = _step_s(apart, best)
    if step_s >= together.step_s:
        return plan
    note = (
        f"a step of all ranks together would take {duration(together.step_s)} ({plan.name}), "
        f"with local steps {duration(step_s)}"
    )
    return replace(apart, local_steps=best, notes=(*apart.notes, note))


def round_s(local: LocalSteps, plan: Plan, groups: int, cluster: Cluster) -> float:
    """Seconds that ranks wait for an average, in all rounds of `sync_every` steps."""
    held = sum(nbytes * Layout(plan).share_of(name) for name, nbytes in plan.parameter_bytes)
    nbytes = held * WIRE_RATIO[local.outer.compress]
    shape = GroupShape.of_axis(
        {"groups": groups, "ranks": plan.world_size}, "groups", cluster.ranks_per_node
    )
    seconds = cluster.seconds("all_reduce", nbytes, shape).seconds
    if local.outer.late and plan.prediction is not None:
        seconds = max(0.0, seconds - local.delay * plan.prediction.step_s)
    return seconds


def _step_s(plan: Plan, steps: PlannedSteps) -> float:
    assert plan.prediction is not None
    assert steps.round_s is not None
    return plan.prediction.step_s + steps.round_s / steps.local.sync_every


def _group_size(problem: PlanningProblem) -> int | None:
    """Ranks of a group, those of a node or under `dp_shard`; None without several groups."""
    strategy, cluster = problem.strategy, problem.cluster
    size = cluster.ranks_per_node if cluster is not None else problem.world_size
    if strategy.dp_shard is not None:
        size = strategy.model_parallel_size * strategy.pp_size * strategy.dp_shard
    divides = size < problem.world_size and problem.world_size % size == 0
    return size if divides else None


def part_of(cluster: Cluster, ranks: int) -> Cluster:
    """The part of a cluster with so many ranks."""
    nodes, rest = divmod(ranks, cluster.ranks_per_node)
    if cluster.uniform and cluster.topology is not None and nodes and not rest:
        return cluster.of_nodes(nodes)
    return replace(cluster, world_size=ranks, ranks_per_node=min(ranks, cluster.ranks_per_node))
