"""Results of one call that depend on each other, and gradients that a backward is not asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import StrategyError
from tests.harness.training import Pair, fixed
from tests.harness.worlds import run


class Chained(nn.Module):
    """A feature, and what a head makes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).tanh()
        return h, self.last(h)


class Apart(Chained):
    """Two results of the same features."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).tanh()
        return h + 1, self.last(h)


ASKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a hook": lambda h, z: h.register_hook(lambda gradient: gradient / 2),
    "a kept gradient": lambda h, z: h.retain_grad(),
    "a derivative": lambda h, z: torch.autograd.grad(z.sum(), h),
    "a derivative of both": lambda h, z: torch.autograd.grad(z.sum() + h.sum(), [h]),
    "a backward by it": lambda h, z: z.sum().backward(inputs=[h]),
}


@pytest.mark.parametrize("name", ASKS)
def test_gradients_through_a_linked_result_are_refused(name: str) -> None:
    model = autopar.compile(Chained(), strategy=fixed(0), fallback=False)
    h, z = model(torch.ones(2, 4))
    with pytest.raises(StrategyError, match="another result of the same call"):
        ASKS[name](h, z)
    h, z = autopar.compile(Apart(), strategy=fixed(0), fallback=False)(torch.ones(2, 4))
    ASKS["a hook"](h, z)
    with torch.no_grad():
        h, z = model(torch.ones(2, 4))
    assert type(h) is Tensor


def test_a_linked_result_is_a_tensor_otherwise() -> None:
    pair = Pair(Chained, strategy=fixed(0))
    for _ in range(2):
        for model in pair.models:
            h, z = model(torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4))
            assert type(h * 2) is type(h.detach()) is Tensor
            (h.square().mean() + z.mean()).backward()
        pair.step()
    pair.check_state()


def ask_for_some(rank: int, world_size: int, zero: int) -> None:
    pair = Pair(Chained, zero)
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    for model in pair.models:
        with model.no_sync() if model is pair.parallel else torch.enable_grad():
            model(x)[1].mean().backward(inputs=[model.last.weight])
        model(2 * x)[1].mean().backward()
    pair.step()
    pair.check_state()
    model = pair.parallel
    with model.no_sync():
        loss = model(x)[1].mean()
        with pytest.raises(StrategyError, match="inside of no_sync"):
            torch.autograd.grad(loss, list(model.parameters()))
    if zero:
        with pytest.raises(ValueError, match="read-only"):
            next(model.parameters()).detach().numpy()[:] = 0


@pytest.mark.parametrize("zero", [0, 3])
def test_no_sync_holds_what_a_backward_is_asked_for(zero: int) -> None:
    run(ask_for_some, 2, zero=zero)


def look_for_nan(rank: int, world_size: int) -> None:
    options: Any = {"strategy": fixed(pp=2, micro_batches=1), "fallback": False}
    model = autopar.compile(Chained(), example_inputs=(torch.ones(4, 4),), **options)
    with torch.autograd.detect_anomaly(), pytest.raises(StrategyError, match="check_nan=False"):
        model(torch.ones(4, 4))
    few = autopar.compile(Chained(), strategy=fixed(0), outputs="own", fallback=False)
    few(torch.ones(4, 4))
    assert len(few(torch.ones(1, 4))[1]) == len(torch.ones(1)[few.own_rows(1)]) == 1


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_two_ranks() -> None:
    run(look_for_nan, 2)


def test_parameters_without_shapes_are_refused() -> None:
    with pytest.raises(StrategyError, match="has no shape yet"):
        autopar.compile(nn.LazyLinear(3), strategy=fixed(0))
