"""Plans for ranks that are not running, predicted by arithmetic and then lowered whole."""

from dataclasses import replace

import torch
from torch import nn

import autopar
from autopar.core.common.deadline import Deadline
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.planner.baseline import Baseline
from autopar.planner.problem import SearchContext
from autopar.session.offline import OfflineDriver
from tests.harness.training import fixed
from tests.planner.problems import problem_of


class Tower(nn.Module):
    """Five equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64, device="meta"), nn.GELU()) for _ in range(5)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_plan_is_lowered_whole_under_its_own_decisions() -> None:
    """Plans of two meshes have one name: ZeRO over all ranks, and over those of a node."""
    model, inputs = Tower(), (torch.empty(32, 64, device="meta"),)
    strategy = Strategy(zero=3, recompute="none", prefetch=1)
    cluster = autopar.Cluster.named("dgx-h100", 2)
    over_all = problem_of(model, strategy, world_size=16, cluster=cluster, comm_backend="nccl")
    within = replace(over_all, strategy=replace(strategy, dp_shard=8))
    driver = OfflineDriver(over_all, model, inputs, None, None, Deadline(600.0), lambda _: None)
    driver.baseline = Baseline(None)
    first, second = (driver.plan_mesh(each, SearchContext()) for each in (over_all, within))
    assert first.name == second.name
    assert (first.hybrid, second.hybrid) == (False, True)
    for few in (first, second):
        whole = driver.refine(few)
        assert whole is not None
        assert whole.hybrid == few.hybrid
        assert not whole.bucket_bytes


def test_a_search_plans_a_batch_of_one_row() -> None:
    model, inputs = Tower(), (torch.empty(1, 4096, 64, device="meta"),)
    cluster = autopar.Cluster.named("dgx-h100", 1)
    strategy = Strategy(search=("cp",), zero=0)
    plan = autopar.plan(model, 2, example_inputs=inputs, cluster=cluster, strategy=strategy)
    assert dict(plan.mesh)["cp"] == 2


def test_fully_shard_that_fits_with_recomputation_is_the_baseline() -> None:
    model, inputs = Tower(), (torch.empty(1 << 16, 64, device="meta"),)
    cluster = autopar.Cluster.named("dgx-h100", 2)

    def planned(recompute: str, memory: int | None = None, **options: int) -> Plan:
        strategy = fixed(3, recompute, **options)
        return autopar.plan(
            model, 16, example_inputs=inputs, cluster=cluster, strategy=strategy, memory=memory
        )

    needed = [planned(level).prediction.needed_bytes for level in ("none", "full")]
    assert needed[1] < needed[0]
    plan = planned("full", memory=needed[1], dp_shard=8)
    assert plan.search.baseline_s > 0
    assert "recompute" in plan.search.baseline


class Tables(nn.Module):
    """A table for each column of ids; the product behind them counts on their number."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(512, 16, device="meta") for _ in range(12))
        self.top = nn.Linear(12 * 16, 64, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = [table(ids[:, column]) for column, table in enumerate(self.tables)]
        return self.top(torch.cat(rows, 1)).square().mean()


def test_a_model_that_does_not_run_with_fewer_blocks_is_lowered_whole_in_limited_time() -> None:
    ids = torch.zeros(64, 12, dtype=torch.long, device="meta")
    cluster = autopar.Cluster.named("dgx-h100", 2)
    plan = autopar.plan(
        Tables(), 16, example_inputs=(ids,), cluster=cluster, strategy="fastest", time_limit_s=30
    )
    assert plan.prediction is not None
    assert not plan.bucket_bytes
