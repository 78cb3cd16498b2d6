"""A derivative of a derivative is an error, on one process and under every kind of plan."""

import pytest
import torch
from torch import nn

import autopar
from tests.harness.training import fixed
from tests.harness.worlds import run


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return layers.double()


def penalized(rank: int, world_size: int) -> None:
    pipeline = fixed(0, pp=2, micro_batches=2)
    several = [fixed(0), fixed(3), fixed(0, tp=2), pipeline]
    x = torch.ones(4, 6, dtype=torch.float64).cumsum(0).requires_grad_()
    target = torch.zeros(4, 1, dtype=torch.float64)
    plain = make()
    (expected,) = torch.autograd.grad(nn.functional.mse_loss(plain(x), target), x)
    for strategy in several if world_size > 1 else [fixed(0)]:
        model = autopar.compile(
            make(), strategy=strategy, loss_fn=nn.functional.mse_loss, fallback=False
        )
        score = model(x, target)
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        torch.testing.assert_close(gradient.detach(), expected)
        assert gradient.requires_grad
        with pytest.raises(autopar.errors.CaptureError, match="differentiated again"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_derivative_is_an_error(ranks: int) -> None:
    run(penalized, ranks)
