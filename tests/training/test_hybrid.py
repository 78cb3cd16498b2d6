"""Levels of the data's axis on real ranks: collectives by level, and ZeRO over neighbours only."""

import pytest
import torch

import autopar
from tests.harness.models import MODELS
from tests.harness.training import (
    EXACT,
    Pair,
    Setup,
    assert_same_training,
    close,
    fixed,
    plain,
    train_all,
)
from tests.harness.worlds import run

LARGE = {"gather_bytes": 1 << 20, "reduce_bytes": 1 << 20}
MIXED = {"": 1, "blocks.0": 3, "blocks.1": 0}
SETUPS = [
    Setup(0, more={"hierarchical": 2, **LARGE}),
    Setup(3, more={"hierarchical": 2, **LARGE}),
    Setup(3, more={"dp_shard": 2}),
    Setup(MIXED, batch="local", rows=12, more={"dp_shard": 2, "hierarchical": True, **LARGE}),
]


def test_training_is_that_of_one_device() -> None:
    answers = run(train_all, 4, name="gpt", dtype=torch.float64, setups=SETUPS, timeout=300)
    for answer in answers:
        for got, setup in zip(answer, SETUPS, strict=True):
            want = plain("gpt", torch.float64, setup.rows)
            assert_same_training(got, want, EXACT[torch.float64], setup)


def hybrid(rank: int, world_size: int) -> None:
    """Clipping, and the state dict in a model that lies otherwise."""
    pair = Pair("encoder", strategy=fixed(3, dp_shard=2))
    args, kwargs = MODELS["encoder"].batch(8, 0)
    for model in pair.models:
        MODELS["encoder"].loss(model(*args, **kwargs)).backward()
    assert pair.parallel.mesh.mesh_dim_names == ("dp_replicate", "dp_shard")
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in pair.models]
    close(norms[1], norms[0])
    pair.check_gradients()
    pair.step()
    other = autopar.compile(MODELS["encoder"].make().double(), strategy=fixed(3))
    other(*args, **kwargs)
    other.load_state_dict(pair.parallel.state_dict())
    close(dict(other.state_dict()), pair.plain.state_dict())
    pair.parallel.load_state_dict(other.state_dict())
    pair.check_state()


@pytest.mark.slow
def test_shards_have_copies() -> None:
    run(hybrid, 4)
