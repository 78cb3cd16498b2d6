"""Programs of ranks whose passes chose otherwise do not run: they would wait for each other."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

import autopar
from autopar.passes.core.pass_base import PassResult
from autopar.passes.memory.checkpoint_activations import CheckpointActivations
from tests.harness.models import MODELS
from tests.harness.training import fixed
from tests.harness.worlds import Raised, run

STAGES = {"pp": 2, "split_points": ("blocks.1",), "schedule": "gpipe", "micro_batches": 2}


def keep_everything(self: CheckpointActivations, graph: Any) -> PassResult:
    return PassResult(graph, "everything is kept")


def train(rank: int, world_size: int, name: str, recompute: str, **options: Any) -> float:
    """The loss of a step in which only rank 0 computes activations again."""
    case = MODELS[name]
    strategy = fixed(0, recompute, tp=2, **options)
    model = autopar.compile(case.make(), strategy=strategy, fallback=False)
    args, kwargs = case.batch(4, 0)
    changed = keep_everything if rank else CheckpointActivations.__call__
    with patch.object(CheckpointActivations, "__call__", changed):
        loss = case.loss(model(*args, **kwargs))
        loss.backward()
    assert torch.isfinite(loss)
    return loss.item()


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), pytest.param(4, STAGES, marks=pytest.mark.slow)],
)
def test_other_messages_are_an_error_on_every_rank(ranks: int, options: dict[str, Any]) -> None:
    answers = run(train, ranks, name="gpt", recompute="everything", expect_errors=True, **options)
    for answer in answers:
        assert isinstance(answer, Raised), answer
        assert answer.type == "DisagreementError", answer
        assert 'give recompute="full"' in answer.message


def test_ranks_with_uneven_parts_may_keep_other_values() -> None:
    """Their cuts differ, so none of them gathers activations again."""
    first, second = run(train, 2, name="uneven", recompute="full")
    assert first == second
