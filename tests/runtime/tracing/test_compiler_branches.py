"""Branches for compilers are compared with the plain model's on the first batch."""

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.core.common import notices
from autopar.errors import NumericsWarning
from tests.harness.training import fixed
from tests.harness.worlds import run


class Masked(nn.Module):
    """Reads the mask unless under a compiler; `scale` makes the two branches differ.

    Every call counts in a buffer, a plain tensor and an integer, and draws random numbers.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.drop, self.scale = nn.Linear(4, 4), nn.Dropout(0.5), scale
        self.register_buffer("calls", torch.zeros(()))
        self.plain_calls, self.count = torch.zeros(()), 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.calls.add_(1)
        self.plain_calls.add_(1)
        self.count += 1
        y = self.drop(self.linear(x)).square().mean(-1)
        if not torch.compiler.is_compiling() and bool(mask.all()):
            return y.mean() * self.scale
        return (y * mask).sum() / mask.sum()


@pytest.fixture(autouse=True)
def _fresh_warnings() -> Iterator[None]:
    notices.ISSUED.clear()
    yield
    notices.ISSUED.clear()


def call(full: bool = True) -> tuple[Tensor, Tensor]:
    mask = torch.ones(4, 4)
    mask[3, 2:] = float(full)
    return torch.rand(4, 6, 4).mean(1), mask[:, 0] if full else mask[:, 3]


def told(model: nn.Module, inputs: tuple[Tensor, Tensor], **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        autopar.compile(model, strategy=fixed(), fallback=False, example_inputs=inputs, **options)
    return [str(w.message) for w in caught if issubclass(w.category, NumericsWarning)]


@pytest.mark.parametrize(
    ("scale", "full", "warned"), [(1.0, True, False), (2.0, True, True), (2.0, False, False)]
)
def test_it_warns_where_the_results_of_both_branches_differ(
    scale: float, full: bool, warned: bool
) -> None:
    found = told(Masked(scale), call(full))
    assert bool(found) == warned
    if warned:
        assert "Masked asks for a compiler at test_compiler_branches.py:" in found[0]
        assert "differ by 5.0e-01" in found[0]


def test_the_comparison_changes_nothing() -> None:
    model, inputs = Masked(2.0), call()
    state = torch.get_rng_state()
    assert told(model, inputs)
    assert torch.equal(state, torch.get_rng_state())
    assert (model.calls.item(), model.plain_calls.item(), model.count) == (0, 0, 0)


def test_branches_that_cannot_be_compared_are_told() -> None:
    with torch.device("meta"):
        model = Masked(1.0)
    model.plain_calls = torch.zeros(())
    (found,) = told(model, call(), init_fn=lambda module: None)
    assert "not compared, for want of values" in found


def told_on_rank(rank: int, world_size: int) -> list[str]:
    notices.ISSUED.clear()
    x, mask = torch.rand(4, 4), torch.tensor([1.0, 0.0, 1.0, 1.0])
    return told(Masked(2.0), (x, mask))


def test_a_difference_in_the_rows_of_one_rank_is_told_on_rank_0() -> None:
    first, second = run(told_on_rank, 2)
    assert len(first) == 1
    assert second == []


def test_a_given_plan_is_compared_too() -> None:
    inputs = call()
    plan = autopar.plan(Masked(2.0), 1, example_inputs=inputs)
    make = functools.partial(told, Masked(2.0), inputs)
    assert len(make(plan=plan)) == 1
