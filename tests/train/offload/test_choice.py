"""Parameters on storage as a choice of the planner, under caps that nothing else meets."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.core.operators import parameters
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.storage import UNMEASURED
from tests.harness.reference import worst_error
from tests.harness.worlds import run

BATCH = (torch.ones(8, 512),)
make_sgd = partial(torch.optim.SGD, lr=0.1)


class Layers(nn.Module):
    """Layers of 1 MiB, beside which activations are small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def planned(ranks: int, folder: Path, memory: int, **options: Any) -> autopar.Plan:
    given = {"gather_bytes": 1 << 18, "reduce_bytes": 1 << 18, "prefetch": 1, **options}
    strategy = autopar.Strategy(zero=3, offload_dir=str(folder), **given)
    return autopar.plan(
        Layers(),
        ranks,
        example_inputs=BATCH,
        strategy=strategy,
        optimizer=make_sgd,
        memory=memory,
        cluster=replace(Cluster.default(ranks), storage=UNMEASURED),
    )


def needed(ranks: int, folder: Path, **options: Any) -> int:
    prediction = planned(ranks, folder, 1 << 30, recompute="full", **options).prediction
    assert prediction is not None
    return prediction.needed_bytes


def train(model: nn.Module) -> list[float]:
    torch.manual_seed(1)
    optimizer, losses = make_sgd(model.parameters()), []
    for _ in range(3):
        loss = model(torch.randn(8, 512))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_like_plain(rank: int, world_size: int, plan: autopar.Plan) -> None:
    plain = Layers()
    model = autopar.compile(Layers(), plan=plan, example_inputs=BATCH)
    assert train(model) == pytest.approx(train(plain), rel=1e-5)
    assert parameters._homes, "nothing lies on storage"
    assert worst_error(model.full_state_dict(), plain.state_dict())[0] <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_leave_where_nothing_else_fits(ranks: int, tmp_path: Path) -> None:
    without, least = needed(ranks, tmp_path), needed(ranks, tmp_path, offload="parameters")
    plan = planned(ranks, tmp_path, (without + least) // 2, offload="auto")
    assert plan.offload_parameters
    assert "parameters offloaded" in plan.name
    assert f"parameters lie in {tmp_path} between their uses" in plan.explain()
    run(train_like_plain, ranks, plan=plan)


def test_they_stay_where_something_cheaper_fits(tmp_path: Path) -> None:
    cap = needed(1, tmp_path) * 11 // 10
    assert not planned(1, tmp_path, cap, offload="auto").offload_parameters
