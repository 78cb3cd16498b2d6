"""Gradients that are differentiated again: those of one process, under every kind of plan."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import autopar
from tests.harness.training import fixed, whole_state
from tests.harness.worlds import run

STEPS = 3
ROWS, WIDTH = 7, 6
STRATEGIES = {
    "ddp": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "tp": {"zero": 0, "tp": 2},
}
Loss = Callable[[nn.Module, Tensor], Tensor]


class Critic(nn.Module):
    """Scores of rows, with layers that have a second derivative of their own."""

    def __init__(self, *, normalized: bool = False) -> None:
        super().__init__()
        first: nn.Module = nn.Linear(WIDTH, 8)
        if normalized:
            first = nn.utils.parametrizations.spectral_norm(first)
        self.layers = nn.Sequential(first, nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8))
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class MeanScore(Critic):
    """The mean of the scores, and themselves."""

    def forward(self, x: Tensor) -> Any:
        scores = super().forward(x)
        return scores.mean(), scores


class Statistics(nn.Module):
    """A critic whose rows see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).square().mean()


class Stopped(nn.Module):
    """A forward with its own gradients: detached values, a backward of its own, a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).tanh()
        with torch.no_grad():
            weight = z.square().mean(1, keepdim=True)
        y = z * weight + z.detach() * z + Cube.apply(z)
        if y.requires_grad:
            y.register_hook(lambda gradient: 0.5 * gradient)
        return self.second(y).square().mean()


class Cube(torch.autograd.Function):
    """A cube that claims the derivative of a square."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


class Attention(nn.Module):
    """Attention over four tokens of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 24), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.roll(1, 1), -x, x * x], 1)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).mean()


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """WGAN-GP: scores of rows in the loop, slopes of norm 1."""
    mixed = (0.5 * x + 0.1).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    return model(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def r1(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on the slope at the data."""
    x = x.clone().requires_grad_()
    score = model(x)
    score = score[0] if isinstance(score, tuple) else score
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    return score + 100 * slope.square().sum(1).mean()


def lazy_rows(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on the slope of rows beside a scalar."""
    x = x.clone().requires_grad_()
    score, rows = model(x)
    (slope,) = torch.autograd.grad(rows.square().sum(), x, create_graph=True)
    return score + slope.square().sum(1).mean()


def curvature(model: nn.Module, x: Tensor) -> Tensor:
    """A PINN: derivatives of the model by its inputs, of first and second order."""
    x = x.clone().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return (second[:, 0] + first[:, 1] - u[:, 0].sin()).square().mean()


def parameter_penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A penalty on the gradients of parameters."""
    score = model(x)
    score = score if score.dim() == 0 else score.square().mean()
    gradients = torch.autograd.grad(score, list(model.parameters()), create_graph=True)
    return score + sum(g.square().sum() for g in gradients)


def double_backward(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient that backward(create_graph=True) leaves in `.grad`."""
    x = x.clone().requires_grad_()
    score = model(x).square().mean()
    score.backward(create_graph=True)
    slope, x.grad = x.grad, None
    assert slope is not None
    model.zero_grad()
    return score + slope.square().sum()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "wgan-gp": (Critic, gradient_penalty),
    "r1": (MeanScore, r1),
    "lazy rows": (MeanScore, lazy_rows),
    "pinn": (Critic, curvature),
    "parameters": (Critic, parameter_penalty),
    "backward": (Critic, double_backward),
    "statistics": (Statistics, r1),
    "statistics of parameters": (Statistics, parameter_penalty),
    "spectral norm": (lambda: Critic(normalized=True), gradient_penalty),
    "own gradients": (Stopped, r1),
    "attention": (Attention, r1),
}


def train(model: nn.Module, loss_of: Loss) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, whole_state(model)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name][0]().double()


def trained(rank: int, world_size: int, name: str, strategy: str) -> None:
    loss_of = CASES[name][1]
    torch.manual_seed(1)
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused attention has one derivative
        expected = train(make(name), loss_of)
    torch.manual_seed(1)
    model = autopar.compile(make(name), strategy=fixed(**STRATEGIES[strategy]), fallback=False)
    torch.testing.assert_close(train(model, loss_of), expected, rtol=1e-9, atol=1e-12)


QUICK = ("r1", "parameters")
SEVERAL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
SLOW_PLANS = [pytest.param(plan, marks=pytest.mark.slow) for plan in ("zero1", "zero2", "tp")]


@pytest.mark.parametrize("name", SEVERAL)
def test_one_process(name: str) -> None:
    run(trained, 1, name=name, strategy="ddp")


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("strategy", ["ddp", "zero3", *SLOW_PLANS])
def test_two_ranks(name: str, strategy: str) -> None:
    run(trained, 2, name=name, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_three_ranks(name: str, strategy: str) -> None:
    run(trained, 3, name=name, strategy=strategy)
