"""`follow`: the strategies of a plan for a call of other sizes or another mode, without a search.

Every strategy is one that the rules prove for the operator and its sizes. Of these an operator
takes the planned one. One that the plan does not know takes the strategy that moves the fewest
bytes of its operands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from autopar.core.ir.graph import TrainingGraph, Value, operands
from autopar.core.ir.placement import OpStrategy, Placement, Replicate, Shard
from autopar.core.plan.partition import NodeStrategies, Partition, by_node_name
from autopar.passes.core.collective_ops import value_of
from autopar.passes.rules.lowerings.ring_attention import RING
from autopar.passes.rules.operators.attention import ties_backward
from autopar.passes.rules.redistribute import redistribute_steps
from autopar.planner.placement.redistributions import placement_read, readers
from autopar.planner.placement.strategies import StrategyChoices, strategy_choices

Chosen = dict[fx.Node, OpStrategy]


def follow(graph: TrainingGraph, partition: Partition) -> NodeStrategies | None:
    """Strategies of a graph that follow a partition; None if some operator cannot."""
    planned = dict(partition.node_strategies)
    layouts = partition.layouts
    pins = {name: layouts.get(name, Replicate()) for name in graph.parameters}
    ring = None if partition.lowers(RING) else False
    route = None if partition.routes else False
    choices = strategy_choices(graph, partition.ranks, pins, ring=ring, route=route)
    chosen: Chosen = {}
    for node in graph.graph.nodes:
        if node not in choices.op_strategies:
            continue  # stands for no other, or has no strategy
        known = planned.get(node.name)
        best, cost = None, (math.inf, math.inf)
        for own in choices.op_strategies[node]:
            moved = _moved_bytes(node, own, choices, chosen, partition.ranks)
            if moved < math.inf and (mine := (_distance(own, known), moved)) < cost:
                best, cost = own, mine
        if best is None:
            return None
        chosen[node] = best
    found = {node: chosen[same] for node, same in choices.same.items() if same in chosen}
    if not all(_can_move(v, found, node, place) for v, node, place in readers(graph)):
        return None
    return by_node_name(found)


def _distance(own: OpStrategy, planned: OpStrategy | None) -> float:
    """0 for the planned strategy, 1 for it with other interleaves; unplanned work rather split."""
    if planned is None:
        places: Iterable[Placement] = (*own.operands, *own.results)
        return 2.0 if any(isinstance(p, Shard) for p in places) else 2.5
    if own == planned:
        return 0.0
    return 1.0 if _without_interleaves(own) == _without_interleaves(planned) else 2.0


def _without_interleaves(own: OpStrategy) -> OpStrategy:
    def plain(placement: Placement) -> Placement:
        return replace(placement, interleave=1) if isinstance(placement, Shard) else placement

    return OpStrategy(tuple(map(plain, own.operands)), tuple(map(plain, own.results)), own.lowering)


def _moved_bytes(
    node: fx.Node, own: OpStrategy, choices: StrategyChoices, chosen: Chosen, ranks: int
) -> float:
    """Bytes of the redistributions of a node's operands; infinite if one is impossible."""
    total = 0.0
    for source, after in zip(operands(node), own.operands, strict=False):
        value = value_of(source)
        before = _placement(value, choices, chosen)
        if before is None or before == after:
            continue
        steps = redistribute_steps(before, after)
        if steps is None or ties_backward(value):
            return math.inf
        kind = value.tensor.shape, value.tensor.element_size(), ranks
        # A slice sends no bytes, but it is not free: the 1 prefers strategies with fewer of them.
        total += 1 + sum(step.message_bytes(*kind) for step in steps if step.collective)
    return total


def _placement(value: Value, choices: StrategyChoices, chosen: Chosen) -> Placement | None:
    """The placement of an operand; None if its producer has none yet."""
    own = chosen.get(choices.same.get(value.node, value.node))
    return None if own is None else own.results[value.index]


def _can_move(value: Value, found: Chosen, node: fx.Node | None, place: int | None) -> bool:
    """Whether a value can be redistributed for one of its readers."""
    after = placement_read(value, node, place, found)
    before = found[value.node].results[value.index]
    steps = redistribute_steps(before, after)
    return before == after or (steps is not None and not ties_backward(value))
