"""Mixtures of transformers train and evaluate exactly when tokens go to their experts alone."""

from typing import Any

import pytest
import torch

import autopar
from autopar.core.ir.placement import Shard
from tests.harness.architectures import EXPERTS
from tests.harness.reference import (
    Reference,
    batches,
    reference,
    relative_error,
    train_steps,
)
from tests.harness.training import ADAMW, assert_same_training, fixed, whole_state
from tests.harness.worlds import run
from tests.passes.tensor_parallel.test_routed_rows import ONE, WIDTH, Mixture

EXACT, STEPS = 1e-9, 3
f64 = torch.float64
APART = {"placements": {"*.experts.*": {"ep": Shard(0)}}, "keep_sharded": True}


def train(
    rank: int, world_size: int, name: str, rows: int, setups: list[dict[str, Any]]
) -> list[tuple[Reference, float]]:
    """Losses, final state and the loss of an evaluation under each setup."""
    case, found = EXPERTS[name].case, []
    for options in setups:
        strategy = fixed(**APART, route_experts=True, **options)
        model = autopar.compile(case.make().double(), strategy=strategy, fallback=False)
        losses = train_steps(
            model, ADAMW(model.parameters()), case, batches(case, range(STEPS), rows, f64)
        )
        assert model.plan is not None
        assert any(partition.routes for partition in model.plan.partitions), options
        args, kwargs = case.batch(rows, STEPS)
        with torch.no_grad():
            loss = case.loss(model.eval()(*args, **kwargs)).item()
        found.append((Reference(losses, whole_state(model)), loss))
    return found


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "ranks", "rows", "setups"),
    [
        ("mixtral", 2, 4, [{"ep": 2}, {"ep": 2, "zero": 3, "recompute": "everything"}]),
        slow("mixtral", 4, 7, [{"ep": 2, "zero": 1, "recompute": "full"}]),  # uneven rows
        slow("mixtral", 4, 8, [{"ep": 2, "zero": 3}, {"ep": 4, "zero": 3}]),
        slow("mixtral", 4, 8, [{"ep": 4, "zero": 3, "hierarchical": 2}]),  # tokens go by node
        slow("deepseek_v3", 4, 8, [{"ep": 4}, {"ep": 2, "pp": 1, "zero": 2}]),
        slow("qwen3_moe", 4, 8, [{"ep": 2, "tp": 2}, {"ep": 4, "zero": 3}]),
        slow("gpt_oss", 2, 4, [{"ep": 2, "zero": 3}]),
    ],
)
def test_tokens_sent_to_their_experts_train_exactly(
    name: str, ranks: int, rows: int, setups: list[dict[str, Any]]
) -> None:
    case = EXPERTS[name].case
    want = reference(case, STEPS, f64, ADAMW, rows)
    plain = case.make().double()
    plain.load_state_dict(want.state)
    args, kwargs = case.batch(rows, STEPS)
    with torch.no_grad():
        loss = case.loss(plain.eval()(*args, **kwargs)).item()
    answers = run(train, ranks, name=name, rows=rows, setups=setups, timeout=400)
    for rank, found in enumerate(answers):
        for (got, own), setup in zip(found, setups, strict=True):
            assert_same_training(got, want, EXACT, f"rank {rank} under {setup}")
            assert relative_error(own, loss) < EXACT, setup


def loads(rank: int, world_size: int) -> list[float | None]:
    """The metric after steps in which all tokens go to one expert, or are gathered."""
    found = []
    for options in ({"route_experts": True}, {"route_experts": False}):
        placements = {"experts.*": {"ep": Shard(0)}}
        strategy = fixed(placements=placements, ep=world_size, **options)
        model = autopar.compile(Mixture(ONE, top=1).double(), strategy=strategy, fallback=False)
        for _ in range(3):
            model(torch.randn(8, WIDTH, dtype=f64)).backward()
        found.append(model.metrics().get("expert_imbalance"))
    return found


def test_the_load_of_the_busiest_rank_is_a_metric() -> None:
    for found in run(loads, 2):
        assert found == [2.0, None]
