"""Bytes that a partition stores where ZeRO shards behind it."""

import torch

from autopar.ir.placement import Placement, Shard
from autopar.ir.roles import Parameter
from autopar.planner.placement.solve import partition
from tests.planner.blocks import Experts, Stack, captured
from tests.planner.test_known_best import machine


def least_bytes(shards: int) -> dict[str, Placement]:
    """Placements of the parameters of two experts over two ranks, with the fewest bytes."""
    with torch.device("meta"):
        graph = captured(Stack(lambda: Experts(64, 2, 16), 1), (4, 32, 64))
    solution = partition(graph, 2, machine(), memory=0, shards=shards)
    roles = zip(graph.inputs, graph.placeholders, strict=True)
    return {
        role.name: solution.op_strategies[node].results[0]
        for role, node in roles
        if isinstance(role, Parameter)
    }


def test_an_expert_is_no_smaller_for_a_second_shard() -> None:
    """Divided by expert, one expert lies whole on one of two shards; otherwise both are halved."""
    for name, placement in least_bytes(shards=2).items():
        assert isinstance(placement, Shard)
        assert placement.dim > 0 or not name.endswith(("up", "down"))
