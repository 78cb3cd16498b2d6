"""Losses of local steps are simulated as ranks have them."""

from typing import Any

import pytest
import torch

import autopar
from autopar import Outer
from benchmarks.slow_links.simulate import Replicas, Setting
from tests.harness.training import fixed
from tests.harness.worlds import run

SETTING = Setting(steps=7, every=2, rows=6, seq=4, width=12, layers=1, lr=1e-2, warm_up=2)
OUTERS = [
    Outer(),
    Outer(lr=0.7, momentum=0.9),
    Outer(warm_up=2),
    Outer(late=True, warm_up=2),
    Outer(late=True, delay=2, momentum=0.5),
    Outer(over="ring", lr=0.7, momentum=0.6, warm_up=1),
    Outer(lr=0.7, momentum=0.6, participants=2, seed=3),
]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    tokens = torch.randint(256, (SETTING.rows, SETTING.seq + 1), generator=rng)
    return tokens[:, :-1], tokens[:, 1:]


def train(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Parameters of a real rank under each outer optimizer."""
    torch.set_default_dtype(torch.float64)
    found = []
    for outer in OUTERS:
        strategy = fixed(0, sync_every=SETTING.every, outer=outer, dp_shard=1)
        model: Any = autopar.compile(SETTING.model(), strategy=strategy, fallback=False)
        adam = torch.optim.AdamW(model.parameters(), lr=SETTING.lr)
        for step in range(1, SETTING.steps + 1):
            adam.param_groups[0]["lr"] = SETTING.lr_at(step)
            model(*batch(step)).backward()
            adam.step()
            adam.zero_grad()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.slow
def test_replicas_are_those_of_real_ranks() -> None:
    answers = run(train, 3)
    torch.set_default_dtype(torch.float64)
    try:
        for number, outer in enumerate(OUTERS):
            replicas = Replicas(SETTING, outer)
            for step in range(1, SETTING.steps + 1):
                replicas.step(*batch(step))
            for found, model in zip(answers, replicas.models, strict=True):
                for name, p in model.named_parameters():
                    error = (found[number][name] - p).abs().max() / p.abs().max()
                    assert error < 1e-9, (outer, name)
    finally:
        torch.set_default_dtype(torch.float32)
