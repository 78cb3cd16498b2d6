"""The traceable forms of torch's functions compute the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture.traceable import traceable
from autopar.errors import BatchError
from tests.harness.training import Pair, close, fixed
from tests.harness.worlds import run

OBSERVATIONS = [(3, 5), (5, 3), (4, 1), (1, 4), (6,)]


@pytest.mark.parametrize("function", [torch.cov, torch.Tensor.cov, torch.corrcoef])
@pytest.mark.parametrize("shape", OBSERVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.int64])
@pytest.mark.filterwarnings("ignore:cov()", "ignore:Casting complex")
def test_covariances(
    function: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (10 * torch.randn(shape, dtype=torch.complex128)).to(dtype)
    torch.testing.assert_close(traceable(function)(x), function(x), equal_nan=True)


def test_other_arguments_of_covariances() -> None:
    x, weights = torch.randn(3, 5), torch.tensor([1, 2, 1, 3, 1])
    cov = traceable(torch.cov)
    torch.testing.assert_close(cov(x, correction=0), torch.cov(x, correction=0))
    torch.testing.assert_close(cov(x, fweights=weights), torch.cov(x, fweights=weights))
    with pytest.raises(RuntimeError, match="two or fewer"):
        cov(torch.randn(2, 2, 2))


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("with_replacement", [False, True])
def test_combinations(count: int, r: int, with_replacement: bool) -> None:
    x = torch.randn(count)
    want = torch.combinations(x, r, with_replacement)
    assert torch.equal(traceable(torch.combinations)(x, r, with_replacement), want)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("minlength", [0, 4, 9])
@pytest.mark.parametrize("function", [torch.bincount, torch.Tensor.bincount])
def test_counts(function: Any, minlength: int, dtype: torch.dtype | None) -> None:
    x = torch.tensor([0, 3, 3, 1], dtype=torch.int32)
    weights = None if dtype is None else torch.tensor([1, 2, 3, 4]).to(dtype)
    want = function(x, weights, minlength=minlength)
    have = traceable(function)(x, weights, minlength=minlength)
    torch.testing.assert_close(have, want)


def test_a_value_beyond_the_bins_is_an_error() -> None:
    with pytest.raises(BatchError, match="no bin of the 4"):
        traceable(torch.bincount)(torch.tensor([0, 4]), minlength=4)


ONE, ZERO, LAST = torch.tensor(1), torch.tensor(0, dtype=torch.int32), torch.tensor(-1)

INDICES = [
    ONE,
    (ONE, ZERO),
    (slice(None), LAST),
    (..., ONE),
    (0, ..., ZERO),
    (slice(1, None), None, ONE),
    (ONE, slice(None), LAST),
    (None, ZERO, 1, ..., ONE),
    (slice(None, None, 2), 1, ONE),
    0,
    (slice(None), [0, 1], ONE),
    (ONE, torch.tensor([0, 1])),
    (ONE, np.array([0, 1])),
    (True, ONE),
    torch.tensor(True),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_items_by_tensors_of_no_dims(index: Any) -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    get, put = traceable(Tensor.__getitem__), traceable(Tensor.__setitem__)
    assert torch.equal(get(x, index), x[index])
    for value in (7, 2.5, torch.tensor(3.0), torch.ones_like(x[index])):
        one, other = x.clone(), x.clone()
        put(one, index, value)
        other[index] = value
        assert torch.equal(one, other)


@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 5, 3)], ids=str)
@pytest.mark.parametrize("is_vector", [False, True])
def test_least_squares(driver: str | None, shape: tuple[int, ...], is_vector: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(shape, dtype=torch.float64), torch.randn(*shape[:-1], 2).double()
    leaves = [a.requires_grad_(), (b[..., 0] if is_vector else b).clone().requires_grad_()]
    forms = torch.linalg.lstsq, traceable(torch.linalg.lstsq)
    results = [lstsq(*leaves, driver=driver) for lstsq in forms]
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want)
    sums = [each.solution.sin().sum() + each.residuals.sum() for each in results]
    want, have = (torch.autograd.grad(each, leaves) for each in sums)
    torch.testing.assert_close(have, want)


def test_least_squares_without_full_rank() -> None:
    a, b = torch.ones(5, 3), torch.randn(5, 2)
    result = traceable(torch.linalg.lstsq)(a, b)
    torch.testing.assert_close(result.solution, torch.linalg.lstsq(a, b).solution)
    assert result.rank == 1
    with pytest.raises(BatchError, match="full rank"):
        traceable(torch.linalg.lstsq)(a, b, driver="gelsd")


class Regressing(nn.Module):
    """Least squares of targets by features of all rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.lstsq(self.linear(x), x[:, :2].sin()).solution.square().sum()


class Decorrelating(nn.Module):
    """A penalty on covariances and correlations of features over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = self.linear(x).t()
        apart = features.cov() - torch.eye(3, dtype=x.dtype)
        return apart.square().sum() + torch.corrcoef(features).square().mean()


def train(rank: int, world_size: int, make: type[nn.Module]) -> None:
    pair = Pair(make, strategy=fixed(0))
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(7, 4, dtype=torch.float64)
        want, have = (model(x) for model in pair.models)
        close(have, want)
        want.backward()
        have.backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


class Selecting(nn.Module):
    """Rows that tensors choose, read and written, all pairs of rows, and counts of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * torch.bincount(x.argmax(1), minlength=4)[:3]
        largest = y.detach().square().sum(1).argmax()
        z = y + 0.5 * y[largest] + y[:, largest % 3, None]
        z[largest, 0] = 2.0
        first, second = torch.combinations(torch.arange(len(x))).unbind(1)
        return z.pow(3).mean() + (z[first] - z[second]).relu().mean()


class Normed(nn.Module):
    """A batch norm whose running statistics are means over all batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).pow(4).mean()


@pytest.mark.slow
@pytest.mark.parametrize("make", [Selecting, Normed, Decorrelating, Regressing])
def test_they_train_exactly(make: type[nn.Module]) -> None:
    run(train, 2, make=make)
