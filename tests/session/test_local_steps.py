"""Local steps that the planner may choose: only with permission, and priced by their rounds."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Link
from tests.harness.models import MODELS
from tests.harness.worlds import run

SLOW = Link(1e-3, 1e-4, 1.25e5)  # so slow that noise of measured operators does not count
STRATEGY = autopar.Strategy(zero=0, recompute="none", gather_bytes=1 << 20)
GPT = MODELS["gpt"]


def cluster(ranks: int, ranks_per_node: int) -> Cluster:
    return replace(Cluster.default(ranks), ranks_per_node=ranks_per_node, link=SLOW)


def planned(lossy: Any, **options: Any) -> autopar.Plan:
    strategy = replace(STRATEGY, **options)
    return autopar.plan(
        GPT.make(), 4, example_inputs=GPT.batch(8, 0)[0], strategy=strategy, lossy=lossy,
        cluster=cluster(4, 2),
    )  # fmt: skip


@pytest.mark.slow
def test_the_planner_takes_the_cheapest_allowed_local_steps() -> None:
    together = planned(["bf16"])
    assert together.local_steps is None
    apart = planned(["local_sgd(steps=4)", "diloco(steps=50, compress='int8')"])
    steps = apart.local_steps
    assert steps is not None
    assert (apart.world_size, steps.groups, steps.local.sync_every) == (2, 2, 50)
    assert "which is lossy" in str(apart)
    assert autopar.Plan.from_dict(apart.to_dict()) == apart
    slower = planned(["diloco(steps=50)"]).local_steps
    assert slower is not None
    late = planned(["late(steps=50, delay=1)"])
    assert late.local_steps is not None
    assert late.prediction is not None
    hidden = slower.round_s - late.local_steps.round_s
    assert hidden == pytest.approx(min(slower.round_s, late.prediction.step_s))
    assert slower.round_s > 2 * steps.round_s, "int8 sends a quarter, over links with a latency"
    assert planned(["diloco(steps=5)"], dp_shard=1).world_size == 1


@pytest.mark.parametrize("lossy", [["diloco"], ["diloco(steps=0)"], ["diloco(every=3)"]])
def test_texts_are_checked(lossy: list[str]) -> None:
    with pytest.raises(autopar.StrategyError, match="lossy"):
        planned(lossy)


def compiled(rank: int, world_size: int) -> None:
    options: dict[str, Any] = {"example_inputs": GPT.batch(4, 0)[0], "cluster": cluster(2, 2)}
    strategy = replace(STRATEGY, dp_shard=1)
    told = pytest.warns(autopar.LossyWarning, match="2 groups of 1 rank")
    with told if rank == 0 else contextlib.nullcontext():
        model = autopar.compile(
            GPT.make(), strategy=strategy, lossy=["local_sgd(steps=2)"], **options
        )
    assert model.plan.local_steps.groups == 2
    again = autopar.compile(GPT.make(), plan=model.plan)
    values = [
        torch.cat([p.detach().flatten() for p in trained(each).parameters()])
        for each in (model, again)
    ]
    assert torch.equal(*values)
    assert autopar.compile(GPT.make(), strategy=strategy, **options).plan.local_steps is None


def trained(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        args, kwargs = GPT.batch(4, seed)
        GPT.loss(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
def test_permission_is_enough_to_compile() -> None:
    run(compiled, 2)
