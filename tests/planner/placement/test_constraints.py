"""Pinned parameters lie where the user says; pins that cannot hold are named with the reason."""

import pytest
import torch

from autopar.core.ir.graph import ParameterInfo
from autopar.core.ir.placement import Partial, Placement, Replicate, Shard
from autopar.core.ir.roles import Parameter
from autopar.errors import StrategyError
from autopar.planner.placement.constraints import resolve_constraints
from autopar.planner.placement.ilp import solve
from tests.planner.blocks import GPTBlock, Stack, captured
from tests.planner.placement.test_ilp import price, work

PARAMETERS = {
    name: ParameterInfo(name, (48, 16), torch.float32, True, name.rpartition(".")[0])
    for name in ("blocks.0.qkv.weight", "blocks.1.qkv.weight")
}


def test_the_last_pattern_counts() -> None:
    pins = {"blocks.*.qkv.weight": Shard(0, 3), "blocks.1.*": Shard(-1)}
    assert list(resolve_constraints(pins, PARAMETERS, 4).values()) == [Shard(0, 3), Shard(1)]


@pytest.mark.parametrize(
    ("pattern", "placement", "ranks", "reason"),
    [
        ("block.*", Shard(0), 2, "'block.*', which no parameter is called: there are blocks.1"),
        ("blocks.0.*", Shard(2), 2, "it has 2 dims"),
        ("blocks.0.*", Shard(1), 5, "dim 1 of 16 leaves nothing for the last of them"),
        ("blocks.0.*", Shard(0, 3), 5, "dim 0 of 48 does not divide into 3 pieces of 5 chunks"),
        ("blocks.0.*", Partial(), 2, "sharded or replicated"),
    ],
)
def test_reasons(pattern: str, placement: Placement, ranks: int, reason: str) -> None:
    with pytest.raises(StrategyError, match=reason.replace("*", r"\*")):
        resolve_constraints({pattern: placement}, PARAMETERS, ranks)


def test_one_block_of_several_can_be_pinned() -> None:
    graph = captured(Stack(lambda: GPTBlock(64, 4), 3), (2, 32, 64))
    pins = {"blocks.1.up.weight": Replicate(), "blocks.2.up.weight": Shard(1)}
    op_strategies = solve(graph, 2, price, work(1e12), pins=pins).op_strategies
    lies = [
        op_strategies[node].results[0]
        for role, node in zip(graph.inputs, graph.placeholders, strict=True)
        if isinstance(role, Parameter) and "up.weight" in role.name
    ]
    assert lies[1:] == [Replicate(), Shard(1)]
    assert lies[0] not in lies[1:]
