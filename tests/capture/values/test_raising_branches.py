"""Conditions that raise are checked by the program; other reads of values are refused.

PYTEST_DONT_REWRITE: an `assert` here is that of a model.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import BatchError, CaptureError
from tests.harness.training import Pair, fixed
from tests.harness.worlds import run


def too_large(y: Tensor) -> None:
    if y is not None and y.max() >= 3:
        raise ValueError(f"not below {3}: {len(y)}")


def not_all(y: Tensor) -> None:
    if not (y < 3).all():
        raise ValueError


def otherwise(y: Tensor) -> None:
    if (y < 3).all():
        pass
    else:
        raise ValueError


def returns(y: Tensor) -> None:
    if (y < 3).all():
        return
    raise ValueError


def asserts_item(y: Tensor) -> None:
    assert torch.all(y < 3).item(), "too large"


def not_item(y: Tensor) -> None:
    if not (y < 3).all().item():
        raise ValueError


def both(y: Tensor) -> None:
    """Two conditions before anything follows."""
    too_large(y)
    if (y < 0).any():
        raise ValueError


class Classes(nn.Module):
    def __init__(self, check: Callable[[Tensor], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.check = nn.Linear(4, 8), nn.Linear(8, 5), check

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        self.check(y)
        return F.cross_entropy(self.last(h.tanh()), y)


def batch(largest: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(largest)
    x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (6,), generator=generator)
    y[-1] = largest
    return x, y


def compare(check: Callable[[Tensor], None], **options: object) -> None:
    pair = Pair(lambda: Classes(check), **options)
    for model in pair.models:
        model(*batch(2)).backward()
    pair.check_gradients()
    with pytest.raises(BatchError, match=r"forward raises an error at .*test_raising_branches"):
        pair.parallel(*batch(3))
    pair.parallel(*batch(2))


@pytest.mark.parametrize(
    "check", [too_large, not_all, asserts_item, not_item, otherwise, returns, both]
)
def test_a_program_raises_too(check: Callable[[Tensor], None]) -> None:
    compare(check, zero=0)


def divided(rank: int, world_size: int) -> None:
    """The last rank alone has the row that is refused."""
    for strategy in (fixed(0), fixed(3), fixed(0, tp=2)):
        compare(both, strategy=strategy)


def test_all_ranks_raise() -> None:
    run(divided, 2)


def warns(y: Tensor) -> None:
    if y.max() >= 3:
        print("large")


def maybe_raises(y: Tensor) -> None:
    if y.max() >= 3 and len(y) > 5:
        raise ValueError


def all_of_two(y: Tensor) -> None:
    """Its answer is that of `all`."""
    if all(map(Tensor.item, [y.max() >= 3, y.min() >= 3])):
        raise ValueError


def compares(y: Tensor) -> None:
    if y.max().item() >= 3:
        raise ValueError


class Features(Classes):
    """Checks values that parameters affect, not those of an argument."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        self.check(h.argmax(1))
        return F.cross_entropy(self.last(h.tanh()), y)


@pytest.mark.parametrize("check", [warns, maybe_raises, all_of_two, compares])
def test_other_reads_are_refused(check: Callable[[Tensor], None]) -> None:
    model = autopar.compile(Features(check).double(), strategy=fixed(0), fallback=False)
    with pytest.raises(CaptureError, match="needs the value of a tensor"):
        model(*batch(2))
