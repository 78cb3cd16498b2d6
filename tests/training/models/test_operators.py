"""Single operators as layers: outputs and gradients are eager's, or an error says why not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError, CaptureError, StrategyError
from tests.harness.training import Pair, close, fixed
from tests.harness.worlds import run

Function = Callable[[Tensor, Tensor], Tensor]


class Applied(nn.Module):
    """A function of an input and a parameter of zeros, such as their sum."""

    def __init__(self, function: Function, *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def compare(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], x: Tensor
) -> None:
    """Outputs and gradients of both models are equal, for an output that is weighted."""
    pair = Pair(lambda: Applied(function, *shape), zero=0)
    results = []
    for model in pair.models:
        given = x.clone().requires_grad_()
        output = model(given)
        weights = torch.arange(output.numel(), dtype=torch.float64).view(output.shape).cos()
        (output * weights).sum().backward()
        results.append({"output": output.detach()})
        if given.grad is not None:
            results[-1]["input"] = given.grad
    close(results[1], results[0])
    pair.check_gradients()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_gradient_that_is_the_incoming_one(shape: tuple[int, ...]) -> None:
    compare(torch.add, shape, torch.randn(shape, dtype=torch.float64))


def test_a_batch_without_rows() -> None:
    compare(torch.mul, (3,), torch.empty(0, 3, dtype=torch.float64))


MATRICES = {
    "cholesky": torch.linalg.cholesky,
    "inv": torch.linalg.inv,
    "power": lambda x: torch.linalg.matrix_power(x, -2),
    "solve": lambda x: torch.linalg.solve(x, x.detach().cos()),
}


@pytest.mark.parametrize("name", MATRICES)
def test_factors_that_lie_transposed(name: str) -> None:
    """Kernels return columns that lie together; failed matrices are marked in this order."""
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    x = x @ x.mT + torch.eye(3)
    compare(lambda x, weight: MATRICES[name](x + weight), (3, 3), x)


TARGETS = torch.tensor([[1, -1, 0, 2], [3, 0, -1, -1], [-1, 1, 2, 3]])
KERNELS = {
    "hardshrink": nn.functional.hardshrink,
    "softshrink": nn.functional.softshrink,
    "multi_margin_loss": lambda x: nn.functional.multi_margin_loss(x, TARGETS[:, 0].clamp(min=0)),
    "multilabel_margin_loss": lambda x: nn.functional.multilabel_margin_loss(x, TARGETS),
    "batch_norm": lambda x: nn.functional.batch_norm(x, x[0].detach(), x[1].detach() ** 2),
    "interpolate": lambda x: nn.functional.interpolate(x[None], 7, mode="nearest"),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_that_torch_has_a_formula_for(name: str) -> None:
    """The formula for multilabel_margin_loss is wrong where a target is -1 and others follow."""
    x = torch.randn(3, 4, dtype=torch.float64)
    compare(lambda x, weight: KERNELS[name](x + weight), (4,), x)


def seed_first(x: Tensor, weight: Tensor) -> Tensor:
    torch.manual_seed(1)
    return torch.rand_like(x) * weight


def seed_apart(x: Tensor, weight: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.rand_like(x) * weight


def seed_last(x: Tensor, weight: Tensor) -> Tensor:
    drawn = torch.rand_like(x) * weight
    torch.manual_seed(1)
    return drawn


@pytest.mark.parametrize("function", [seed_first, seed_apart, seed_last])
def test_a_forward_that_seeds_is_refused(function: Function) -> None:
    with pytest.raises(CaptureError, match="seeds torch's generator"):
        compare(function, (3,), torch.randn(2, 3, dtype=torch.float64))


def test_sparse_arguments_are_refused() -> None:
    with pytest.raises(BatchError, match="sparse"):
        compare(lambda x, weight: x @ weight, (3, 2), torch.eye(3, dtype=torch.float64).to_sparse())


class Counting(nn.Module):
    """Adds the rows of one argument to another in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        total += x.detach()
        return (x * self.weight).sum()


class Spectral(nn.Module):
    """Filters the frequencies of columns, over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(x * self.weight, dim=1)
        return torch.fft.ifft(spectrum, dim=0).real.square().sum()


def check_spectral(rank: int, world_size: int, zero: int) -> None:
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pair = Pair(Spectral, zero=zero, fallback=False)
    losses = [model(x) for model in pair.models]
    for loss in losses:
        loss.backward()
    close(*losses)
    pair.check_gradients()


@pytest.mark.slow
def test_complex_rows_are_gathered_over_gloo() -> None:
    """Gloo has all-gathers of complex numbers, but no all-to-alls."""
    for zero in (0, 3):
        run(check_spectral, 2, zero=zero)


def change_argument(rank: int, world_size: int) -> str:
    x = torch.randn(5, 3, dtype=torch.float64)
    parallel = autopar.compile(Counting(), strategy=fixed(0), fallback=False)
    with pytest.raises(StrategyError) as error:
        parallel(x, x.clone())
    return str(error.value)


@pytest.mark.slow
def test_arguments_changed_in_place_by_rows_are_refused() -> None:
    """Rows of other ranks would stay as they are."""
    for message in run(change_argument, 2):
        assert "changes argument 1 in place" in message
