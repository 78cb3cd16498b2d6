"""Rows of tokens at the ranks of their experts: exact under every router, and fewer bytes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.core.ir.mesh_levels import INTRA_NODE, level
from autopar.core.ir.placement import Placement, Routed, Shard
from autopar.core.operators.routing import route_rows
from autopar.core.operators.row_copies import distinct_rows, first_rows, passed_rows, sum_rows
from autopar.core.plan.plan import Plan
from autopar.passes.rules.redistribute import redistribute_steps
from tests.harness.architectures import Double
from tests.harness.training import fixed
from tests.passes import simulated
from tests.passes.meshes import PlannedRanks

EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
EXACT = 1e-11
WIDTH, INNER = 6, 10
APART = {"placements": {"experts.*": {"ep": Shard(0)}}, "keep_sharded": True}


class Experts(nn.Module):
    """Matrices of experts, in parameters of three dims."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * INNER))
        self.down = nn.Parameter(torch.randn(count, INNER, WIDTH))

    def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
        order = experts.argsort(stable=True)
        ends = torch.bincount(experts, minlength=len(self.up)).cumsum(0, dtype=torch.int32)
        gate, hidden = F.grouped_mm(rows[order], self.up, offs=ends).chunk(2, -1)
        made = F.grouped_mm(F.silu(gate) * hidden, self.down, offs=ends)
        return made[order.argsort()]


class Mixture(nn.Module):
    """A layer of experts; `skew` says how much the router prefers each of them."""

    def __init__(self, skew: Sequence[float], top: int = 2, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.top = top
        self.register_buffer("skew", torch.tensor(skew))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, len(skew)) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(len(skew)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        with Double():
            for gate, experts in zip(self.gates, self.experts, strict=True):
                weights, chosen = (gate(x) + self.skew).softmax(-1).topk(self.top)
                rows = x[:, None].expand(-1, self.top, -1).reshape(-1, WIDTH)
                made = experts(rows, chosen.reshape(-1)).view(-1, self.top, WIDTH)
                x = x + (made * weights[..., None]).sum(1)
        return x.square().mean()


def planned(model: nn.Module, rows: int, ranks: int, zero: int = 0, **options: Any) -> PlannedRanks:
    """A model under a plan that sends rows to their experts."""
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    options = {**APART, "route_experts": True, **options}
    strategy = fixed(zero, **options)
    plan = autopar.plan(model, ranks, example_inputs=(x,), strategy=strategy)
    return PlannedRanks(model, (x,), plan, backend="gloo")


def routes(plan: Plan) -> bool:
    """Whether a plan sends rows to their experts."""
    return any(partition.routes for partition in plan.partitions)


EVEN, ONE, LAST = [0.0] * 4, [50.0, 0.0, 0.0, 0.0], [0.0, 0.0, 50.0, 50.0]


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("skew", [EVEN, ONE, LAST], ids=["even", "all to one", "a rank without"])
def test_every_router_trains_exactly(skew: list[float], top: int) -> None:
    it = planned(Mixture(skew, top).double(), 8, 2, ep=2)
    assert routes(it.plan)
    assert max(it.errors().values()) < EXACT


@pytest.mark.parametrize(
    ("ranks", "rows", "experts", "options"),
    [
        (2, 13, 7, {"ep": 2, "zero": 3}),  # uneven rows and experts
        (4, 8, 7, {"ep": 2, "zero": 3, "recompute": "full"}),
        pytest.param(4, 12, 7, {"ep": 4, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param(4, 8, 6, {"ep": 2, "pp": 2, "micro_batches": 2}, marks=pytest.mark.slow),
    ],
)
def test_meshes_train_exactly(ranks: int, rows: int, experts: int, options: dict[str, Any]) -> None:
    skew = [0.3, -0.2, 0.4, 0.1, 0.0, 0.2, -0.1][:experts]
    it = planned(Mixture(skew, layers=2).double(), rows, ranks, **options)
    assert routes(it.plan)
    assert max(it.errors().values()) < EXACT


def exchanged_bytes(it: PlannedRanks, near: int = 1) -> int:
    """Bytes that leave nodes of `near` ranks in a step."""
    graphs = [it.program(rank) for rank in it.ranks]
    total = 0

    def counted(parts: Sequence[Tensor], options: Any) -> list[Tensor]:
        nonlocal total
        for rank, (part, (_, sent, axis)) in enumerate(zip(parts, options, strict=True)):
            node = {"ep": near, level("ep", INTRA_NODE): near}.get(axis, 1)
            row = part[:1].numel() if part.numel() else 0
            others = sum(rows for peer, rows in enumerate(sent) if peer // node != rank // node)
            total += others * row * part.element_size()
        return plain(parts, options)

    plain = simulated.COLLECTIVES[EXCHANGE]
    with patch.dict(simulated.COLLECTIVES, {EXCHANGE: counted}):
        simulated.run_ranks(graphs, [it.values(g, r) for r, g in enumerate(graphs)])
    return total


def test_ranks_send_only_rows_of_others_experts() -> None:
    """Rows of 3 of 4 ranks go to the rank of the one expert, and come back."""
    model = Mixture(ONE, top=1).double()
    it = planned(model, 64, 4, ep=4)
    gathered = planned(model, 64, 4, ep=4, route_experts=False)
    assert not routes(gathered.plan)
    assert exchanged_bytes(it) < exchanged_bytes(gathered) / 2


class Weighted(Mixture):
    """Rows are weighed one by one, so those of a rank's own experts can be weighed there."""

    def forward(self, x: Tensor) -> Tensor:
        with Double():
            for gate, experts in zip(self.gates, self.experts, strict=True):
                weights, chosen = (gate(x) + self.skew).softmax(-1).topk(self.top)
                rows = x[:, None].expand(-1, self.top, -1).reshape(-1, WIDTH)
                made = experts(rows, chosen.reshape(-1)) * weights.reshape(-1, 1)
                x = x + made.view(-1, self.top, WIDTH).sum(1)
        return x.square().mean()


def once(it: PlannedRanks, near: int) -> PlannedRanks:
    """The plan with tokens that go once to nodes of `near` ranks; 0: once to each expert."""
    partitions = tuple(replace(own, once=near) for own in it.plan.partitions)
    return replace(it, plan=replace(it.plan, partitions=partitions))


SKEWS = {
    "uneven": [0.3, -0.2, 0.4, 0.1, 0.0, 0.2, -0.1, 0.5],
    "all to a rank": [50.0, 50.0, 49.0] + [0.0] * 5,
    "a node without": [0.0] * 4 + [50.0] * 4,
}


@pytest.mark.parametrize(("skew", "top"), [("uneven", 4), ("all to a rank", 3)])
def test_tokens_that_go_once_to_each_node_train_exactly(skew: str, top: int) -> None:
    model = Weighted(SKEWS[skew], top, layers=2).double()
    it = planned(model, 12, 4, ep=4, hierarchical=2)
    assert [own.once for own in it.plan.partitions] == [2]
    for near in (2, 1, 0):
        assert max(once(it, near).errors().values()) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [(8, {"ep": 4, "zero": 3}), (8, {"ep": 4, "tp": 2}), (4, {"ep": 4, "recompute": "full"})],
)
def test_meshes_whose_tokens_go_once_train_exactly(
    ranks: int, options: dict[str, Any], skew: str
) -> None:
    it = planned(Weighted(SKEWS[skew], 3, layers=2).double(), 16, ranks, hierarchical=2, **options)
    assert it.plan.partitions[-1].once > 0
    assert max(it.errors().values()) < EXACT


def test_a_token_leaves_its_node_once() -> None:
    """The 16 tokens of a node go to the other one, with all 4 experts, as 16 rows, not as 64."""
    width = 96
    with patch(f"{__name__}.WIDTH", width):
        model = Weighted(SKEWS["a node without"], 4).double()
        it = planned(model, 32, 4, ep=4, hierarchical=2)
        by_node, by_copy = (exchanged_bytes(once(it, near), near=2) for near in (2, 0))
        assert max(it.errors().values()) < EXACT
    assert by_copy - by_node > 0.95 * (64 - 16) * width * 8  # less the places of rows


def test_a_plan_names_the_nodes_that_a_token_goes_to_once(tmp_path: Path) -> None:
    plan = planned(Weighted(SKEWS["uneven"], 3).double(), 16, 4, ep=4, hierarchical=2).plan
    assert any("goes once to each node of 2 ranks" in note for note in plan.notes)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == plan
    replace(plan, levels=()).save(tmp_path / "flat.json")
    with pytest.raises(autopar.PlanError, match="once is 2, but no"):
        autopar.Plan.load(tmp_path / "flat.json")


def test_distinct_rows_are_read_and_summed_where_copies_were() -> None:
    """Two tokens have three experts each, of six on three ranks."""
    experts = torch.tensor([0, 1, 4, 5, 4, 2])
    places, sent = distinct_rows(experts, 6, 3, 1, 3)
    firsts, _ = first_rows(experts, 6, 3, 1, 3, 0)
    assert sent.tolist() == [1, 1, 2]
    assert firsts.tolist() == [0, 5, 2, 3]  # a row of each token for each rank
    assert places.tolist() == [0, 0, 0, 0, 1, 1]
    _, wanted = first_rows(experts, 6, 3, 3, 3, 0)
    assert wanted.tolist() == [[1, 0, 1], [0, 1, 1]]
    passed, sent = passed_rows(wanted, 0)
    assert (passed.tolist(), sent.tolist()) == ([0, 1, 0, 1], [1, 1, 2])
    total = sum_rows(torch.arange(4.0)[:, None], torch.tensor([2, 0, 2, 2]), [3])
    assert total.flatten().tolist() == [1.0, 0.0, 5.0]


def test_rows_stay_where_an_operator_mixes_them() -> None:
    """A norm over rows between two products is of all rows, so these are put back before it."""

    class Normed(Experts):
        def forward(self, rows: Tensor, experts: Tensor) -> Tensor:
            return super().forward(rows - super().forward(rows, experts).softmax(0), experts)

    model = Mixture(EVEN)
    model.experts[0] = Normed(4)
    it = planned(model.double(), 8, 2, ep=2)
    assert max(it.errors().values()) < EXACT


def test_rows_that_go_straight_to_the_next_experts_are_gathered() -> None:
    """Rows between two layers of experts would lie in the order of either."""

    class Chained(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            with Double():
                for gate, experts in zip(self.gates, self.experts, strict=True):
                    x = experts(x, gate(x).argmax(1))
            return x.square().mean()

    it = planned(Chained(EVEN, layers=2).double(), 8, 2, ep=2, keep_sharded=False)
    assert not routes(it.plan)
    errors = it.errors()
    assert max(errors.values()) < EXACT


def test_routed_rows_come_from_shards_of_rows_alone() -> None:
    for text in ("E(0)", "E(0, x3)"):
        assert str(Placement.of(text)) == text
    kinds = [step.kind for step in redistribute_steps(Shard(1), Routed()) or ()]
    assert kinds == ["all_to_all", "route"]
    kinds = [step.kind for step in redistribute_steps(Routed(0, 2), Routed()) or ()]
    assert kinds == ["route_back", "all_gather", "slice", "route"]


def test_rows_are_sorted_by_the_rank_of_their_expert() -> None:
    order, inverse, sent = route_rows(torch.tensor([4, 0, 2, 3, 0]), 5, 2)
    assert order.tolist() == [1, 2, 4, 0, 3]
    assert order[inverse].tolist() == list(range(5))
    assert sent.tolist() == [3, 2]  # of 5 experts, the first rank has 3
