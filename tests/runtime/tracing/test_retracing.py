"""A changed graph is refused, though no guard sees what changed."""

import contextlib
import sys
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError, DisagreementError
from autopar.runtime.tracing import retracing
from tests.harness.training import fixed
from tests.harness.worlds import Raised, run


class Limited(nn.Module):
    """A model that reads a number of the interpreter, which no guard follows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        scale = sys.getrecursionlimit() / 1000
        return (self.down(self.up(x).relu()) * scale).square().mean()


@contextlib.contextmanager
def changed_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 1)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@pytest.fixture
def always() -> Iterator[None]:
    with patch.object(retracing, "SPARING", 0.0):
        yield


def train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(6, 4)).backward()


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_the_same_graph_passes(precision: str | None, always: None) -> None:
    model = autopar.compile(Limited(), strategy=fixed(0), precision=precision)
    with patch.object(retracing, "describe", wraps=retracing.describe) as described:
        train(model, 9)
    assert described.call_count == 2 * 3  # after the calls 2, 4 and 8


def test_another_graph_is_refused(always: None) -> None:
    model = autopar.compile(Limited(), strategy=fixed(0))
    train(model, 2)
    message = r"Limited computes something else .* before call 3\. Its forward reads"
    with changed_limit(), pytest.raises(CaptureError, match=message):
        train(model, 1)


def test_tracing_again_is_spared() -> None:
    model = autopar.compile(Limited(), strategy=fixed(0))
    train(model, 2)
    with changed_limit():
        train(model, 2)
    assert model._execution.retracing.due is None


def test_modes_and_shapes_are_told_apart(always: None) -> None:
    layers = nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1)
    model = autopar.compile(nn.Sequential(*layers), strategy=fixed(0))
    for rows in (2, 3, 3, 4, 4, 5, 6, 7, 8):
        model.train(rows % 2 == 0)
        model(torch.ones(rows, 4)).sum().backward()


def change_on_one(rank: int, world_size: int, *, strategy: autopar.Strategy) -> None:
    with patch.object(retracing, "SPARING", 0.0):
        model = autopar.compile(Limited(), strategy=strategy, fallback=False)
        train(model, 4)
        with changed_limit() if rank == 1 else contextlib.nullcontext():
            train(model, 1)


@pytest.mark.parametrize("strategy", [fixed(3), fixed(0, pp=2, micro_batches=2)])
def test_ranks_fail_together(strategy: autopar.Strategy) -> None:
    first, second = run(change_on_one, 2, strategy=strategy, expect_errors=True)
    assert isinstance(first, Raised)
    assert isinstance(second, Raised)
    assert first.type == DisagreementError.__name__
    assert second.type == CaptureError.__name__
