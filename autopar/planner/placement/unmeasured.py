"""Partitions without measured costs, and with parameter placements fixed by a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from glob import escape
from math import prod

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, Value
from autopar.core.ir.placement import OpStrategy, Placement, Replicate, Shard
from autopar.core.plan.partition import NodeStrategies, Partition, by_node_name
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS
from autopar.passes.rules.lowerings.ring_attention import RING
from autopar.passes.rules.redistribute import redistribute_steps
from autopar.passes.rules.registry import loops_of
from autopar.planner.placement.constraints import resolve_constraints
from autopar.planner.placement.ilp import solve
from autopar.planner.placement.solve import views_of

ITERATION_S = 1e-10
"""Nominal seconds of one iteration of an operator's loops."""

BYTE_S = 1e-10
"""Nominal seconds to move a byte."""

STEP_S = 1e-9
"""Nominal seconds of a redistribution without bytes."""


def partition_by_bytes(
    graph: TrainingGraph,
    ranks: int,
    pins: Mapping[str, Placement] | None = None,
    *,
    keep_sharded: bool = False,
    ring: bool | None = False,
    route: bool | None = None,
) -> NodeStrategies:
    """Strategies that best trade moved bytes for sharded work, at nominal costs.

    The result depends only on the arguments, so all processes find the same. With `keep_sharded`,
    pinned parameters are used as they lie. `ring` and `route` are as for
    `strategy_choices`.
    """
    found = resolve_constraints(pins or {}, graph.parameters, ranks)
    fixed = views_of(graph, found) if keep_sharded else frozenset[fx.Node]()

    def price(value: Value, before: Placement, after: Placement) -> float:
        if value.node in fixed:
            return math.inf
        kind = value.tensor.shape, value.tensor.element_size(), ranks
        moved = (
            s.message_bytes(*kind) for s in redistribute_steps(before, after) or () if s.collective
        )
        return STEP_S + BYTE_S * sum(moved) * (ranks - 1) / ranks

    iterations: dict[fx.Node, int] = {}

    def work(node: fx.Node, op_strategy: OpStrategy) -> float:
        if node not in iterations:
            iterations[node] = _iterations(node)
        divided = any(isinstance(p, Shard) for p in (*op_strategy.operands, *op_strategy.results))
        moved = 0
        if op_strategy.lowering == RING:
            sent = CUSTOM_LOWERINGS[RING].traffic(Operator.of(node), op_strategy, ranks)
            moved = sum(nbytes for _, nbytes in sent)
        return ITERATION_S * iterations[node] / (ranks if divided else 1) + BYTE_S * moved

    solution = solve(graph, ranks, price, work, pins=found, ring=ring, route=route)
    return by_node_name(solution.op_strategies)


def repartition(graph: TrainingGraph, partition: Partition) -> NodeStrategies:
    """Strategies for another call of a model, with the parameter placements of a plan."""
    pins: dict[str, Placement] = {escape(name): Replicate() for name in graph.parameters}
    pins |= {escape(name): placement for name, placement in partition.layouts.items()}
    ring = partition.lowers(RING)
    route = None if partition.routes else False
    return partition_by_bytes(graph, partition.ranks, pins, ring=ring, route=route)


def _iterations(node: fx.Node) -> int:
    """Number of iterations of an operator's loops, at least its number of result elements."""
    if node.op != "call_function":
        return 0
    operator = Operator.of(node)
    looped = prod(loop.size for loop in loops_of(operator))
    return max([looped, *(t.numel() for t in operator.results if isinstance(t, torch.Tensor))])
