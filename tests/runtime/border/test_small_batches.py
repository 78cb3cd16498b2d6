"""A last batch with fewer rows than ranks, and a first call that is an evaluation."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Strategy
from tests.harness.reference import Reference
from tests.harness.training import ADAMW, assert_same_training, fixed, whole_state
from tests.harness.worlds import run

WIDTH = 4
SIZES = (6, 1, 5, 2, 1)


class Net(nn.Module):
    """Blocks, so that a pipeline can be cut; `reading` reads a value, so that it falls back."""

    def __init__(self, returns_rows: bool = False, reads: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.returns_rows, self.reads = returns_rows, reads

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        if self.reads and x.detach().sum().item() > 1e9:
            x = -x
        return x if self.returns_rows else (x - y).square().mean()


def batch(rows: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(
        2, rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)
    )
    return x, y


def loop(model: Any, evaluates_first: bool = False) -> Reference:
    optimizer, losses = ADAMW(model.parameters()), []
    if evaluates_first:
        losses.append(evaluation(model, SIZES[0]))
    for rows in SIZES:
        x, y = batch(rows)
        x.requires_grad_()
        result = model(x, y)
        loss = result if result.dim() == 0 else (result - y).abs().sqrt().sum()
        loss.backward()
        assert x.grad is not None
        losses += [loss.item(), x.grad.square().sum().item()]
        optimizer.step()
        optimizer.zero_grad()
    return Reference([*losses, evaluation(model, 1)], whole_state(model))


def evaluation(model: Any, rows: int) -> float:
    model.eval()
    with torch.no_grad():
        value = model(*batch(rows)).sum().item()
    model.train()
    return value


def train(
    rank: int, world_size: int, evaluates_first: bool, options: dict[str, Any], **compiled: Any
) -> Reference:
    return loop(autopar.compile(Net(**options).double(), **compiled), evaluates_first)


@pytest.mark.parametrize(
    ("ranks", "strategy", "options"),
    [
        (3, fixed(0), {}),
        (3, fixed(3), {"returns_rows": True}),
        (2, Strategy(tp=2), {}),
        (2, Strategy(pp=2, micro_batches=1), {}),
        (3, "ddp", {"reads": True}),
    ],
    ids=["ddp", "zero3-rows", "tp", "pp", "fallback"],
)
def test_fewer_rows_than_ranks(ranks: int, strategy: Any, options: dict[str, Any]) -> None:
    want = loop(Net(**options).double())
    for got in run(train, ranks, evaluates_first=False, options=options, strategy=strategy):
        assert_same_training(got, want, 1e-9)


def train_last_batch(rank: int, world_size: int, **options: Any) -> Reference:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = last_batch(autopar.compile(Net(**options).double(), strategy=Strategy(tp=2)))
    said = [str(each.message) for each in caught if "no faster than one" in str(each.message)]
    assert bool(said) == (rank == 0)
    return found


def last_batch(model: Any) -> Reference:
    optimizer, losses = ADAMW(model.parameters()), []
    for rows in (8, 7, 8, 7):
        x, y = batch(rows)
        result = model(x, y)
        loss = result if result.dim() == 0 else (result - y).abs().sqrt().sum()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Reference([*losses, evaluation(model, 5)], whole_state(model))


@pytest.mark.parametrize("returns_rows", [False, True])
def test_an_uneven_batch_is_computed_whole_where_ranks_divide_rows_further(
    returns_rows: bool,
) -> None:
    """The rows of a rank are split along tp too, where nothing else is worth dividing."""
    want = last_batch(Net(returns_rows=returns_rows).double())
    for got in run(train_last_batch, 4, returns_rows=returns_rows):
        assert_same_training(got, want, 1e-9)


@pytest.mark.parametrize("strategy", ["auto", "zero3", Strategy(pp=2)], ids=["auto", "zero3", "pp"])
def test_an_evaluation_goes_first(strategy: Any) -> None:
    want = loop(Net().double(), evaluates_first=True)
    for got in run(train, 2, evaluates_first=True, options={}, strategy=strategy):
        assert_same_training(got, want, 1e-9)
