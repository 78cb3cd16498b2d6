"""Graphs partitioned along two axes compute what one device computes."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar._torch import FakeTensorMode
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import OpStrategy, Partial, Placement, Replicate
from autopar.core.ir.roles import Input, InputRole, Output
from autopar.core.plan.partition import NodeStrategies, by_node_name, operators_hash
from autopar.passes.core.collective_ops import (
    collective,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)
from autopar.passes.core.runner import run_passes
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.operators.partial_linear import linear_strategies
from autopar.passes.rules.proof.oracle import is_close, shard_tensor, unshard
from autopar.passes.rules.proof.spmd_interpreter import run_spmd
from autopar.passes.rules.registry import loops_of
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.passes.tensor_parallel.partition_in_order import partition_in_order
from autopar.planner.placement.strategies import strategy_choices
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.passes.partitions import captured, kept_shards, module_of, whole
from tests.passes.rules.samples import loop_strategies
from tests.passes.rules.test_rules import shapes

Find = Callable[[str, TrainingGraph], NodeStrategies]
WHOLE = Replicate()


def together(graph: TrainingGraph, values: Sequence[Tensor], find: Find) -> list[Tensor | None]:
    """The results of ranks that partition a graph along its axes by the strategies of rank 0.

    Args:
        graph: graph on whole tensors, with the sizes of its axes, outermost first.
        values: values of its placeholders.
        find: finds the strategies of a graph along an axis.
    """
    axes, ranks = graph.axes, list(product(*map(range, graph.axes.values())))
    turns = partition_in_order(axes, graph, dict.fromkeys(axes, 0), find)
    first = {axis: own for axis, _, own in turns}
    programs, texts = [], set()
    for at in ranks:
        place = dict(zip(axes, at, strict=True))
        own = list(partition_in_order(axes, graph, place, lambda axis, _: first[axis]))
        texts.add(str([(operators_hash(before), shapes(before.graph)) for _, before, _ in own]))
        passes = [PartitionAxis(axis, place[axis], found) for axis, _, found in own]
        last = run_passes(graph, passes)
        programs.append(module_of(last))
    assert len(texts) == 1, "ranks of one axis are left with different programs"
    placed = [_placed(graph, first[axis]) for axis in axes]
    parts = [list(values)]
    for n, lies in zip(axes.values(), placed, strict=True):
        cuts = [
            [
                shard_tensor(x, lies.get(role, WHOLE), n)
                for x, role in zip(part, graph.inputs, strict=True)
            ]
            for part in parts
        ]
        parts = [[own[rank] for own in each] for each in cuts for rank in range(n)]
    results: list[list[Any]] = run_spmd(programs, parts, axes)
    for (axis, n), lies in zip(reversed(axes.items()), reversed(placed), strict=True):
        lies = {**lies, **kept_shards(last, axis)}
        groups = [results[i : i + n] for i in range(0, len(results), n)]
        results = [_joined(graph, lies, group) for group in groups]
    return results[0]


def _placed(graph: TrainingGraph, found: NodeStrategies) -> dict[InputRole, Placement]:
    """Placements of the inputs that are not replicated."""
    roles = {node.name: role for node, role in zip(graph.placeholders, graph.inputs, strict=True)}
    return {roles[name]: op_strategy.results[0] for name, op_strategy in found if name in roles}


def _joined(
    graph: TrainingGraph, lies: Mapping[Any, Placement], parts: list[list[Any]]
) -> list[Any]:
    """The whole results of the ranks of one axis."""
    made: list[Any] = []
    for role, own in zip(graph.outputs, zip(*parts, strict=True), strict=True):
        where = lies.get(role) or lies.get(getattr(role, "of", None), WHOLE)
        made.append(None if own[0] is None else unshard(own, where))
        assert (made[-1] is None) == (own[0] is None), f"ranks disagree about {role}"
    return made


def cheapest(axis: str, graph: TrainingGraph) -> NodeStrategies:
    """Strategies by bytes; parameters are replicated along cp."""
    pins = dict.fromkeys(graph.parameters, WHOLE) if axis == "cp" else None
    return partition_by_bytes(graph, graph.axes[axis], pins)


def at_random(axis: str, graph: TrainingGraph) -> NodeStrategies:
    """Random strategies of every operator, at any cost."""
    draw, maximum = random.Random(axis), Partial("max")
    found = strategy_choices(graph, graph.axes[axis])

    def one(node: fx.Node) -> OpStrategy:
        possible = [
            op_strategy
            for op_strategy in found.op_strategies[found.same[node]]
            if maximum not in (*op_strategy.operands, *op_strategy.results)
        ]
        return draw.choice(possible)

    alike = {stands: one(stands) for stands in found.op_strategies}
    return by_node_name(
        {node: alike[stands] for node, stands in found.same.items() if stands in alike}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "axes", "find"),
    [  # few rows, so that something else is split
        ("encoder", 1, {"tp": 3, "cp": 2}, cheapest),
        ("moe", 3, {"tp": 2, "ep": 2}, cheapest),
        ("conv", 3, {"tp": 2, "cp": 2}, cheapest),
        ("conv", 3, {"tp": 2, "ep": 2}, at_random),
        ("odd", 2, {"tp": 2, "ep": 2}, at_random),
    ],
)
def test_ranks_equal_one_device(name: str, rows: int, axes: dict[str, int], find: Find) -> None:
    case = MODELS[name]
    batch = to_dtype(case.batch(rows, 0), torch.float64)
    graph, values = captured(case.make().double(), batch, 1)
    graph = replace(graph, axes=axes)
    torch.manual_seed(0)
    want = whole(graph, values)
    torch.manual_seed(0)
    found = together(graph, [values[role] for role in graph.inputs], find)
    for role, made in zip(graph.outputs, found, strict=True):
        if made is not None:
            assert is_close(made, want[role]), role


# -- collectives of another axis ---------------------------------------------------------------

INNER, OUTER = 3, 2
EXCHANGED: list[tuple[Any, tuple[int, ...], tuple[Any, ...]]] = [
    (start_all_reduce, (4, 2), ()),
    (start_all_reduce, (4, 2), ("max",)),
    (start_all_gather, (4, 6, 2), ([4 * INNER],)),
    (start_reduce_scatter, (4 * INNER, 6), ([4],)),
    (start_all_to_all, (2 * INNER, 4, 2), ()),
]


def exchange(start: Any, shape: tuple[int, ...], options: tuple[Any, ...], count: int) -> fx.Graph:
    """A rank's program of one collective of `count` tensors."""
    graph = fx.Graph()
    with FakeTensorMode():
        given = [graph.placeholder(f"x{i}") for i in range(count)]
        for node in given:
            node.meta = {"val": torch.empty(shape, dtype=torch.float64), "phase": "forward"}
        if start in (start_all_gather, start_reduce_scatter):
            options = (options[0] * count,)
            results = collective(graph, given[0], start, given, *options, "tp")
        else:
            results = collective(graph, given[0], start, given, "tp", *options)
    graph.output(results)
    return graph


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(("start", "shape", "options"), EXCHANGED)
def test_collectives_of_another_axis(
    start: Any, shape: tuple[int, ...], options: tuple[Any, ...], count: int
) -> None:
    program = exchange(start, shape, options, count)
    roles = tuple(map(Input, range(count))), tuple(map(Output, range(count)))
    graph = TrainingGraph(program, *roles, {}, axes={"tp": INNER, "cp": OUTER})
    parts = [[torch.randn(shape, dtype=torch.float64) for _ in range(count)] for _ in range(INNER)]
    want = run_spmd([program] * INNER, parts)
    (node,) = program.find_nodes(op="call_function", target=start)
    operator = Operator.of(node)
    possible = [
        *loop_strategies(loops_of(operator), OUTER, (1, 2)),
        *linear_strategies(operator),
    ]
    assert len(possible) >= 2
    for op_strategy in possible:
        passes = [PartitionAxis("cp", rank, ((node.name, op_strategy),)) for rank in range(OUTER)]
        programs = [run_passes(graph, [one]).graph for one in passes]
        got = run_spmd(programs * INNER, [p for p in parts for _ in programs], graph.axes)
        for rank, results in enumerate(got):
            for have, true in zip(results, want[rank // OUTER], strict=True):
                assert is_close(have, true), op_strategy
