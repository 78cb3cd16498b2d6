"""Rows divided by speed: exact as even rows are, from a plan, measured or seen while training."""

import time
from typing import Any
from unittest import mock

import pytest
import torch

import autopar
from autopar.core.ir.placement import proportional_rows
from autopar.runtime.module import DistributedModule
from autopar.session import balance
from autopar.session.balance import speeds_of
from tests.harness.worlds import Raised, run

ROWS, STEPS = 7, 3


class Coupled(torch.nn.Module):
    """Batch norm and an attention over rows: rows of all ranks meet, twice in a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8)
        self.down = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.up(x)).relu()
        mixed = (hidden @ hidden.T).softmax(-1) @ hidden
        return (self.down(mixed) - y).square().mean()


def train(
    model: Any, shares: tuple[tuple[float, ...], ...], rows: int = ROWS
) -> list[torch.Tensor]:
    """Losses of some steps, then the parameters; rows are divided anew before each step."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        torch.manual_seed(step)
        x, y = torch.randn(rows, 4), torch.randn(rows, 2)
        if isinstance(model, DistributedModule):
            model.divide_rows(shares[step])
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    if isinstance(model, DistributedModule):
        return [*found, *model.full_state_dict().values()]
    return [*found, *model.state_dict().values()]


def deviation(rank: int, world_size: int, *, strategy: str) -> float:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = Coupled()
    inputs = torch.randn(ROWS, 4), torch.randn(ROWS, 2)
    torch.manual_seed(0)
    model = autopar.compile(Coupled(), strategy=strategy, example_inputs=inputs, outputs="own")
    expected = train(plain, ())
    shares = (3.0, 1.0, 1.0), (1.0, 5.0, 2.0), ()
    found = train(model, shares)
    errors = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300))
        for a, b in zip(found, expected, strict=True)
    ]
    return max(errors)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_divided_rows_are_exact(strategy: str) -> None:
    assert max(run(deviation, 3, strategy=strategy)) < 1e-9


def rebalance(rank: int, world_size: int) -> tuple[tuple[float, ...], list[int]]:
    """Rank 1 is busy for twice as long for each of its rows."""
    inputs = torch.ones(9, 4), torch.ones(9, 2)
    model = autopar.compile(Coupled(), strategy="ddp", example_inputs=inputs, outputs="own")
    for _ in range(5):
        model(*inputs).backward()
        rows = model.own_rows(9)
        deadline = (rows.stop - rows.start) * (0.04 if rank else 0.02)
        time.sleep(deadline)
    shares = model.rebalance()
    model(*inputs).backward()
    rows = model.own_rows(9)
    assert autopar.Plan.from_dict(model.plan.to_dict()).row_shares == shares  # type: ignore
    return shares, [rows.start, rows.stop]


@pytest.mark.slow
def test_rebalance_by_the_speeds_seen() -> None:
    (shares, first), (same, second) = run(rebalance, 2)
    assert shares == same
    assert shares[0] == 1.0
    assert 0.35 < shares[1] < 0.75
    assert first in ([0, 5], [0, 6])
    assert second == [first[1], 9]


class Blocks(torch.nn.Module):
    """Eight equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8))
        self.down = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return (self.down(x) - y).square().mean()


def stages_by_speed(rank: int, world_size: int) -> tuple[int, float]:
    """Rank 1 is three times as slow; returns the weights of this rank's stage, and the error."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain = Blocks()
    inputs = torch.randn(8, 4), torch.randn(8, 2)
    torch.manual_seed(0)
    strategy = autopar.Strategy(pp=2, micro_batches=4, schedule="1f1b", balance="measured")
    with mock.patch.object(balance, "seconds_of_product", return_value=1.0 + 2 * rank):
        model = autopar.compile(Blocks(), strategy=strategy, example_inputs=inputs)
    assert model.plan is not None
    assert model.plan.pipeline is not None
    held = sum(name.endswith("weight") for name in model.plan.pipeline.held(rank))
    expected, found = train(plain, (), 8), train(model, ((), (), ()), 8)
    errors = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
    return held, max(errors)


def test_stages_follow_the_speeds() -> None:
    (first, error), (second, other) = run(stages_by_speed, 2)
    assert first + second == 9
    assert 6 <= first <= 8
    assert max(error, other) < 1e-12


def refuse(rank: int, world_size: int) -> None:
    strategy = autopar.Strategy(tp=2, balance="measured")
    inputs = torch.ones(4, 4), torch.ones(4, 2)
    autopar.compile(Coupled(), strategy=strategy, example_inputs=inputs)


def test_rows_that_cannot_be_divided() -> None:
    for answer in run(refuse, 2, expect_errors=True):
        assert isinstance(answer, Raised)
        assert answer.type == "StrategyError"


def measured(rank: int, world_size: int) -> int:
    strategy = autopar.Strategy(zero=0, balance="measured")
    inputs = torch.ones(8, 4), torch.ones(8, 2)
    model = autopar.compile(Coupled(), strategy=strategy, example_inputs=inputs, outputs="own")
    model(*inputs).backward()
    return len(range(8)[model.own_rows(8)])


def test_measured_shares_cover_the_batch() -> None:
    assert sum(run(measured, 2)) == 8


def test_shares() -> None:
    assert speeds_of([[1.0, 1.0, 1.0], [2.0, 2.1, 1.9]]) == (1.0, 0.5)
    assert speeds_of([[1.0, 1.0, 1.0], [2.0, 1.01, 2.0]]) == ()  # equal in one round
    for rows in range(3, 20):
        held = proportional_rows(rows, (1.0, 0.5, 0.1))
        assert sum(held) == rows
        assert min(held) >= 1
    assert proportional_rows(10, (1.0, 1.0, 1.0)) == (4, 3, 3)
