"""Backwards that need another program of their call, outside of what was around the call."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import StrategyError
from tests.harness.reference import relative_error
from tests.harness.training import fixed, whole_state
from tests.harness.worlds import run

ROWS, WIDTH = 8, 6


class Scores(nn.Module):
    """Two layers under a loss, which autocast computes in bfloat16, beside the scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.head(torch.tanh(self.body(x)))
        return nn.functional.cross_entropy(scores.float(), y), scores


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randint(4, (ROWS,), generator=draw)


def train(model: Any, *, with_scores: bool) -> dict[str, Tensor]:
    """Steps of two calls under autocast each, whose backwards run outside of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    is_compiled = hasattr(model, "no_sync")
    for step in range(2):
        for part in range(2):
            with model.no_sync() if part == 0 and is_compiled else contextlib.nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss, scores = model(*batch(2 * step + part))
                if with_scores and part == 1:
                    loss = loss + 0.1 * scores.float().square().mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_state(model) if is_compiled else model.state_dict()


def train_on_rank(rank: int, world_size: int, **options: Any) -> list[dict[str, Tensor]]:
    strategy = fixed(options.pop("zero", 0), **options)
    return [
        train(autopar.compile(Scores(), strategy=strategy, fallback=False), with_scores=with_scores)
        for with_scores in (False, True)
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"zero": 3}, {"tp": 2}, {"pp": 2, "micro_batches": 2, "schedule": "1f1b"}],
    ids=str,
)
def test_held_gradients_under_the_loops_own_autocast(options: dict[str, Any]) -> None:
    wanted = [train(Scores(), with_scores=with_scores) for with_scores in (False, True)]
    for states in run(train_on_rank, 2, **options):
        for state, want in zip(states, wanted, strict=True):
            assert max(relative_error(state[name], want[name]) for name in want) < 2**-7


def backward_in_another_mode(rank: int, world_size: int) -> str:
    model = autopar.compile(Scores(), strategy=fixed(), fallback=False)
    with model.no_sync():
        model(*batch(0))[0].backward()
    loss, _ = model(*batch(1))
    model.eval()
    with pytest.raises(StrategyError) as caught:
        loss.backward()
    return str(caught.value)


def test_a_changed_mode_is_refused() -> None:
    for text in run(backward_in_another_mode, 2):
        assert "another mode since (train, eval, requires_grad)" in text
