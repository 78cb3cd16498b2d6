"""What people found by thought the planner finds by itself: bytes of known architectures.

Sizes are real, tensors fake, prices those of the shipped H100 node. A unit is one activation,
rows x length x width: an all-gather or a reduce-scatter of it sends one, an all-reduce two.
Megatron with sequence parallelism sends 8 a layer: forward and backward each gather twice and
reduce-scatter twice.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import Shard
from autopar.core.ir.roles import Parameter
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.optimizer_step import UpdateCost
from autopar.cost_model.memory.liveness import Overhead
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.lowerings.registry import CUSTOM_LOWERINGS
from autopar.passes.rules.redistribute import redistribute_steps
from autopar.planner.machine import Machine
from autopar.planner.placement.ilp import Solution
from autopar.planner.placement.solve import partition
from tests.planner.blocks import Experts, GPTBlock, LlamaBlock, Stack, T5Block, captured

RANKS = 8
MEGATRON = 8.0


def machine() -> Machine:
    cluster = Cluster.named("dgx-h100")
    operators = OperatorTimes.load(cluster.device)
    return Machine(cluster, operators, UpdateCost.modelled(operators.roofline), Overhead())


def solved(
    block: Callable[[], nn.Module], depth: int, *shape: int
) -> tuple[TrainingGraph, Solution]:
    with torch.device("meta"):
        graph = captured(Stack(block, depth), shape)
    return graph, partition(graph, RANKS, machine())


def sent(solution: Solution) -> Counter[str]:
    """Bytes that a rank sends by kind of collective, over (ranks - 1) / ranks."""
    found: Counter[str] = Counter()
    for made in solution.conversions:
        for step in redistribute_steps(made.before, made.after) or ():
            if step.collective:
                tensor = made.value.tensor
                size = step.message_bytes(tensor.shape, tensor.element_size(), RANKS)
                found[step.collective] += size * made.count
    for node, op_strategy in solution.op_strategies.items():
        if op_strategy.lowering:
            for collective, size in CUSTOM_LOWERINGS[op_strategy.lowering].traffic(
                Operator.of(node), op_strategy, RANKS
            ):
                found[collective] += size
    found["all_reduce"] *= 2
    return found


def units_per_layer(block: Callable[[], nn.Module], *shape: int) -> float:
    totals = [sum(sent(solved(block, depth, *shape)[1]).values()) for depth in (2, 3)]
    rows, length, width = shape
    return (totals[1] - totals[0]) / (rows * length * width * 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [lambda: GPTBlock(4096, 32), lambda: LlamaBlock(4096, 32, 8), lambda: T5Block(4096, 32)],
    ids=["gpt", "llama", "t5"],
)
def test_no_more_bytes_than_megatron(block: Callable[[], nn.Module]) -> None:
    """Of one long row: with more, sums of gradients beside the backward are faster."""
    assert units_per_layer(block, 1, 2048, 4096) <= MEGATRON * 1.001


def test_a_long_sequence_of_few_heads_is_split() -> None:
    graph, solution = solved(lambda: GPTBlock(256, 2, causal=False), 2, 1, 32768, 256)
    attention = [n for n in graph.calls() if "attention" in str(n.target)]
    assert len(attention) == 4
    assert all(solution.op_strategies[node].results[0] == Shard(2) for node in attention)


def test_tokens_move_to_experts() -> None:
    graph, solution = solved(lambda: Experts(1024, 16, 256), 2, 8, 2048, 1024)
    inputs = zip(graph.inputs, graph.placeholders, strict=True)
    lies = {role: solution.op_strategies[node].results[0] for role, node in inputs}
    experts = {lies[Parameter(f"blocks.{i}.{name}")] for i in (0, 1) for name in ("up", "down")}
    assert experts == {Shard(0)}
    assert sent(solution)["all_to_all"] > 0
