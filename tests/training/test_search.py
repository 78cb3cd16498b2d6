"""A mesh that the planner chooses, on real processes: trained as on one device."""

from typing import Any

import pytest
import torch

import autopar
from autopar.cost_model.cluster.cluster import Cluster
from tests.harness.models import MODELS
from tests.harness.reference import Reference, batches, train_steps
from tests.harness.training import assert_same_training, fixed, optimizer_of, plain, whole_state
from tests.harness.worlds import run

ROWS, STEPS = 8, 10
GPT = MODELS["gpt"]
WHOLE = sum(p.nbytes for p in GPT.make().double().parameters())


def train(rank: int, world_size: int, memory: int) -> Any:
    strategy = fixed(0, "full", search=("tp",))
    model = autopar.compile(
        GPT.make().double(),
        strategy=strategy,
        memory=memory,
        cluster=Cluster.default(world_size),
        fallback=False,
    )
    optimizer = optimizer_of(torch.float64)(model.parameters())  # before the mesh is known
    losses = train_steps(model, optimizer, GPT, batches(GPT, range(STEPS), ROWS, torch.float64))
    assert model.plan is not None
    return Reference(losses, whole_state(model)), model.plan, model.data_parallel_size


@pytest.mark.slow
def test_the_model_is_divided_where_whole_copies_do_not_fit() -> None:
    """ZeRO is ruled out, and parameters, gradients and states are four times the parameters."""
    memory = int(3.9 * WHOLE)
    want = plain("gpt", torch.float64, ROWS, STEPS)
    for found, plan, size in run(train, 2, memory=memory):
        assert_same_training(found, want, 1e-9)
        assert plan.model_parallel_size == 2
        assert size == plan.dp_size == 1
        assert plan.prediction.needed_bytes <= memory
