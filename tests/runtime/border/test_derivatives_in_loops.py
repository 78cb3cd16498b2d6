"""Second derivatives beside what else a loop does, and where they are refused."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd import functional as AF

import autopar
from autopar.errors import CaptureError, StrategyError
from tests.harness.training import fixed, whole
from tests.harness.worlds import run

ROWS = 6
Gradients = list[Tensor | None]


class Score(nn.Module):
    """A loss of the rows of a small net."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh())
        self.net = nn.Sequential(layers, nn.Linear(6, 2)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class Rows(Score):
    """The rows themselves."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Dropped(Score):
    """A loss that draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.net(x), 0.5).square().mean()


def compiled(model: nn.Module, zero: int = 0, batch: str = "global", **options: Any) -> Any:
    rows = {"rows": 0} if batch == "local" else {}
    strategy = fixed(zero, **options)
    return autopar.compile(model, strategy=strategy, batch=batch, fallback=False, **rows)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def gradients(model: nn.Module) -> Gradients:
    return [None if p.grad is None else whole(p.grad) for p in model.parameters()]


def check(tensors: Iterable[Any], expected: Iterable[Any]) -> None:
    torch.testing.assert_close(
        [whole(t) for t in tensors], [whole(t) for t in expected], rtol=1e-9, atol=1e-12
    )


# What is exact.


def adapted(model: nn.Module, x: Tensor) -> Gradients:
    """MAML with one inner step."""
    slow = dict(model.named_parameters())
    inner = torch.func.functional_call(model, slow, (x,))
    steps = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
    fast = {name: p - 0.1 * step for (name, p), step in zip(slow.items(), steps, strict=True)}
    torch.func.functional_call(model, fast, (x + 1,)).backward()
    return gradients(model)


def accumulated(model: nn.Module, x: Tensor) -> Gradients:
    """Two micro-batches, the first inside of no_sync."""
    for part in range(2):
        hold = getattr(model, "no_sync", None) if part == 0 else None
        own = (x + part).requires_grad_()
        with contextlib.nullcontext() if hold is None else hold():
            score = model(own)
            (slope,) = torch.autograd.grad(score, own, create_graph=True)
            (score + slope.square().sum()).backward()
    return gradients(model)


def curved(model: nn.Module, x: Tensor) -> Gradients:
    """Products of the Hessian of parameters with a vector."""
    parameters = list(model.parameters())
    slopes = torch.autograd.grad(model(x), parameters, create_graph=True)
    vectors = [numbers(*p.shape, seed=i) for i, p in enumerate(parameters)]
    return list(torch.autograd.grad(slopes, parameters, vectors))


def hessian_product(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(AF.hvp(model, x, numbers(*x.shape, seed=4)))


def left_in_grad(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Gradients of `backward(create_graph=True)`, clipped and stepped by."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        model(x).backward(create_graph=True)
        slopes = [p.grad for p in model.parameters() if p.grad is not None]
        sum(slope.square().sum() for slope in slopes).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


LOOPS: dict[str, Callable[..., Any]] = {
    loop.__name__: loop for loop in (adapted, accumulated, curved, hessian_product, left_in_grad)
}


def in_loop(rank: int, world_size: int, name: str) -> None:
    for zero in (0, 3) if world_size > 1 else (0,):
        x = numbers(5, 3)
        check(LOOPS[name](compiled(Score(), zero), x.clone()), LOOPS[name](Score(), x.clone()))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_loops(ranks: int, name: str) -> None:
    run(in_loop, ranks, name=name)


def penalized_rows(model: nn.Module, x: Tensor) -> Gradients:
    """A loss of own rows, their slopes and curvatures; gradients of the rows come first."""
    x = x.clone().requires_grad_()
    rows = model(x)
    (slope,) = torch.autograd.grad(rows.square().sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.pow(3).sum(), x, create_graph=True)
    loss = rows.square().mean() + (slope.norm(dim=1) - 1).square().mean() + bend.square().mean()
    loss.backward()
    return [x.grad, *gradients(model)]


def mixed(model: nn.Module, x: Tensor, ranks: int) -> Gradients:
    """Gradients of parameters, penalized by other weights on every rank."""
    score = model(x)
    slopes = torch.autograd.grad(score, list(model.parameters()), create_graph=True)
    penalty = sum(slope.square().sum() for slope in slopes)
    loss = score
    for part in x.chunk(ranks):
        loss = loss + part.square().sum() * penalty / ranks
    loss.backward()
    return gradients(model)


def local(rank: int, world_size: int) -> None:
    x = numbers(ROWS, 3)
    own = x[rank * ROWS // world_size : (rank + 1) * ROWS // world_size]
    for zero in (0, 3):
        expected, *of_parameters = penalized_rows(Rows(), x)
        slope, *others = penalized_rows(compiled(Rows(), zero, "local"), own)
        check(others, of_parameters)
        assert expected is not None
        check([slope], [world_size * expected[rank * len(own) : (rank + 1) * len(own)]])
        check(mixed(compiled(Score(), zero, "local"), own, 1), mixed(Score(), x, world_size))
        check(left_in_grad(compiled(Score(), zero, "local"), own), left_in_grad(Score(), x))


@pytest.mark.slow
def test_local_batches() -> None:
    run(local, 2)


def drawn(rank: int, world_size: int) -> None:
    answers = []
    for again in (False, True):
        torch.manual_seed(3)
        model = compiled(Dropped())
        x = numbers(5, 3).requires_grad_()
        score = model(x)
        (slope,) = torch.autograd.grad(score, x, create_graph=again)
        answers.append([score.detach(), slope.detach(), torch.rand(2), model.rng_state])
    check(answers[1], answers[0])
    slope.square().sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_random_numbers_are_drawn_once(ranks: int) -> None:
    run(drawn, ranks)


@pytest.mark.slow
def test_gradgradcheck() -> None:
    x = numbers(2, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(compiled(Rows()), (x,))


# What is refused.


def in_pipeline(rank: int, world_size: int) -> None:
    model, x = compiled(Score(), pp=2, micro_batches=2), numbers(4, 3).requires_grad_()
    (expected,) = torch.autograd.grad(Score()(x), x)
    (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
    check([slope.detach()], [expected])
    with pytest.raises(CaptureError, match="a pipeline has no second derivative"):
        slope.square().sum().backward()


@pytest.mark.slow
def test_pipelines_refuse() -> None:
    run(in_pipeline, 2)


def batched(rank: int, world_size: int) -> None:
    with pytest.raises(CaptureError, match="many gradients at once"):
        AF.jacobian(compiled(Rows()), numbers(4, 3), vectorize=True)


@pytest.mark.slow
def test_several_ranks_refuse_batched_gradients() -> None:
    run(batched, 2)


def test_what_changed_since_the_call_is_an_error() -> None:
    model, x = compiled(Score()), numbers(4, 3).requires_grad_()
    score = model(x)
    with torch.no_grad():
        model.net[1].bias.add_(1)
    with pytest.raises(StrategyError, match=r"net\.1\.bias was changed in place"):
        torch.autograd.grad(score, x, create_graph=True)
    score = model(x)
    model.eval()
    with pytest.raises(StrategyError, match="another mode"):
        torch.autograd.grad(score, x, create_graph=True)


def test_transforms_are_an_error() -> None:
    model, x = compiled(Score()), numbers(4, 3)
    with pytest.raises(CaptureError, match=r"torch\.func"):
        torch.func.grad(model)(x)
    with forward_ad.dual_level(), pytest.raises(CaptureError, match="forward_ad"):
        model(forward_ad.make_dual(x, x))
