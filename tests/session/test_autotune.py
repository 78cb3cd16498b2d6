"""Plans tried where they run: the one taken trains as on one device, and nothing else is left."""

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from tests.harness.models import MODELS
from tests.harness.reference import Reference, batches, train_steps
from tests.harness.training import assert_same_training, optimizer_of, plain, whole_state
from tests.harness.worlds import run

ROWS, STEPS, f64 = 8, 4, torch.float64
GPT = MODELS["gpt"]


def compiled(world_size: int, early: bool) -> nn.Module:
    (args, kwargs), *_ = batches(GPT, [0], ROWS, f64)
    assert not kwargs
    return autopar.compile(
        GPT.make().double(),
        strategy=autopar.Strategy(recompute="none", micro_batches=1, search=("pp", "tp")),
        example_inputs=args if early else None,
        cluster=Cluster.default(world_size),
        fallback=False,
        trials=3,
    )


def train(rank: int, world_size: int, early: bool) -> Any:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model = compiled(world_size, early)
    optimizer = optimizer_of(f64)(model.parameters())
    losses = train_steps(model, optimizer, GPT, batches(GPT, range(STEPS), ROWS, f64))
    same = torch.equal(before, torch.get_rng_state())
    return Reference(losses, whole_state(model)), model.plan, same


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False], ids=["example inputs", "first call"])
def test_what_is_taken_trains_as_on_one_device(early: bool) -> None:
    want = plain("gpt", f64, ROWS, STEPS)
    found = run(train, 2, early=early)
    assert len({plan.digest() for _, plan, _ in found}) == 1
    for trained, plan, same_random_numbers in found:
        assert_same_training(trained, want, 1e-9)
        assert any("plans that ran for" in note for note in plan.notes)
        assert same_random_numbers
