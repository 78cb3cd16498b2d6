"""Prices along an axis."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.core.ir.signature import signature, time_key
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing
from autopar.passes.rules.loops import Operator, split_loop
from autopar.passes.rules.registry import loops_of
from autopar.planner.placement.costs import PlacementCosts, local_node, shards_of
from autopar.planner.placement.strategies import strategy_choices
from tests.planner.blocks import Stack, captured


def test_half_of_an_operator_takes_half_of_its_time() -> None:
    graph = captured(Stack(lambda: nn.Linear(512, 512, bias=False), 1), (1024, 512))
    node = next(n for n in graph.calls() if n.target is torch.ops.aten.mm.default)
    (rows, *_) = map(split_loop, loops_of(Operator.of(node)))
    taken = {time_key(node): 0.1, time_key(local_node(node, rows, 2)): 0.3}
    times = {key: Timing(seconds, 1e9, 0, "2026-01-01") for key, seconds in taken.items()}
    operators = replace(OperatorTimes.load("cpu"), times=times)
    prices = PlacementCosts(GroupShape(2, 2, 1), Cluster.default(2), operators)
    assert 0.045 < prices.operator(node, rows).seconds < 0.06
    assert prices.operator(node, rows).kind == "measured"


def test_shards_take_what_they_took_alone() -> None:
    """The proportion is that of both timed alone; the seconds are those of a step."""
    graph = captured(Stack(lambda: nn.Linear(512, 512, bias=False), 1), (1024, 512))
    node = next(n for n in graph.calls() if n.target is torch.ops.aten.mm.default)
    operators = OperatorTimes.load("cpu").measure_alone(
        shards_of(strategy_choices(graph, 2).op_strategies, 2)
    )
    rehearsed = Timing(0.1, 1e9, 0, "2026-01-01", rehearsed=True)
    operators = replace(operators, times={time_key(node): rehearsed})
    prices = PlacementCosts(GroupShape(2, 2, 1), Cluster.default(2), operators)
    for op_strategy in map(split_loop, loops_of(Operator.of(node))):
        parts = [signature(n) for n in (local_node(node, op_strategy, 2), node)]
        part, whole = (operators.alone[key] for key in parts)
        assert prices.operator(node, op_strategy).seconds == pytest.approx(
            0.1 * min(1, part / whole)
        )
