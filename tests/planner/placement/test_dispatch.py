"""Tokens go once to a rank or a node by price, at those of the shipped H100 nodes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.mesh_levels import Levels
from autopar.core.operators.row_copies import distinct_share
from autopar.cost_model.cluster.cluster import Cluster
from autopar.planner.placement.dispatch import Dispatch, dispatch_along, tokens_along
from autopar.planner.placement.solve import costs_along
from tests.planner.blocks import captured
from tests.planner.test_known_best import machine

EXPERTS, WIDTH, TOKENS, NODE = 64, 2048, 2**15, 8


class Mixture(nn.Module):
    """A layer of experts, which weighs rows where they come back."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.top, self.gate = top, nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.gate(x).softmax(-1).topk(self.top)
        rows = x[:, None].expand(-1, self.top, -1).reshape(-1, WIDTH)
        made = torch.ops.autopar.expert_mm(rows, self.up, experts.reshape(-1))
        return (made.view(-1, self.top, WIDTH) * weights[..., None]).sum(1)


def graph(top: int, ranks: int) -> TrainingGraph:
    with torch.device("meta"):
        made = captured(nn.Sequential(nn.Linear(WIDTH, WIDTH), Mixture(top)), (TOKENS, WIDTH))
    return replace(made, axes={"ep": ranks})


def chosen(top: int, ranks: int, by_level: bool | None = None) -> Dispatch:
    cluster = Cluster.named("dgx-h100", nodes=max(2, ranks // NODE))
    there = replace(machine(), cluster=cluster)
    mesh = {"dp": cluster.world_size // ranks, "ep": ranks, **Levels("ep", NODE).sizes(ranks)}
    prices = costs_along(ranks, there, mesh=mesh, axis="ep")
    return dispatch_along(graph(top, ranks), ranks, prices, min(NODE, ranks), by_level)


def test_a_token_goes_once_to_each_node_across_nodes() -> None:
    assert chosen(6, 16).once == NODE
    assert chosen(6, 16, by_level=False).once < 2


def test_a_token_goes_once_to_each_rank_where_that_saves_more_than_it_copies() -> None:
    assert chosen(32, 8, by_level=True).once == 1
    assert chosen(6, 8).once == 0  # of 6 copies, 4.5 leave a rank, over NVLink


def test_a_token_of_one_expert_is_no_copy() -> None:
    assert chosen(1, 16) == Dispatch()


def test_hops_are_a_row_for_each_node_then_for_each_rank() -> None:
    own, *_ = tokens_along(graph(6, 16), 16).values()
    assert own.hops(0, 16) == [("ep", 1.0)]
    assert own.hops(1, 16) == [("ep", own.share(16))]
    shares = [("ep.inter_node", own.share(2)), ("ep.intra_node", own.share(16))]
    assert own.hops(NODE, 16) == shares


@pytest.mark.parametrize(("parts", "copies"), [(2, 2), (4, 3), (8, 6), (3, 2)])
def test_shares_are_those_of_random_routers(parts: int, copies: int) -> None:
    count, tokens = 24, 20000
    generator = torch.Generator().manual_seed(0)
    experts = torch.rand(tokens, count, generator=generator).topk(copies).indices
    places = experts // (count // parts)
    distinct = torch.zeros(tokens, parts).scatter(1, places, 1.0).sum().item()
    assert distinct_share(count, parts, copies) == pytest.approx(
        distinct / places.numel(), rel=0.02
    )
