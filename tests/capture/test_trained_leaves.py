"""Trained tensors that are no parameters of the model, and outputs that are parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import StrategyError
from tests.harness.training import fixed, whole_state
from tests.harness.worlds import run

f64 = torch.float64
X, Y = (torch.randn(6, 6, dtype=f64, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
SCALE = torch.ones(6, dtype=f64, requires_grad=True)


class Model(nn.Module):
    """Computes rows by `use`, and returns what `also` takes from it beside the loss."""

    def __init__(self, use: Callable[..., Tensor], also: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.use, self.also = use, also
        self.layer = nn.Linear(6, 6)
        self.scale = torch.ones(6, dtype=f64, requires_grad=True)

    def forward(self, x: Tensor, *given: Any) -> Any:
        loss = F.mse_loss(self.use(self, x, *given), Y)
        return loss if self.also is None else (loss, self.also(self))


def outside(scale: Tensor) -> Callable[..., Tensor]:
    return lambda model, x: model.layer(x) * scale


@pytest.mark.parametrize(
    ("use", "given"),
    [
        (lambda model, x: model.layer(x) * model.scale, ()),
        (lambda model, x: model.layer(x) * SCALE, ()),
        (outside(torch.ones(6, dtype=f64, requires_grad=True)), ()),
        (lambda model, x, head: head(model.layer(x)), (nn.Linear(6, 6).double(),)),
    ],
)
def test_others_are_refused(use: Callable[..., Tensor], given: tuple[Any, ...]) -> None:
    model = autopar.compile(Model(use, None).double(), strategy=fixed(0))
    with pytest.raises(StrategyError, match=r"trains a tensor.*is no parameter"):
        model(X, *given)


def test_others_may_be_detached() -> None:
    model = Model(lambda model, x: model.layer(x) * model.scale.detach(), None).double()
    loss = autopar.compile(copy.deepcopy(model), strategy=fixed(0))(X)
    torch.testing.assert_close(loss, model(X))


RETURNED: dict[str, Callable[[Any], Any]] = {
    "parameter": lambda model: model.layer.weight,
    "view": lambda model: model.layer.weight.T,
    "row": lambda model: [model.layer.weight[0], model.layer.bias],
}


def penalize(rank: int, world_size: int) -> None:
    for also in RETURNED.values():
        torch.manual_seed(0)
        plain = Model(lambda model, x: model.layer(x), also).double()
        for strategy in (fixed(0), fixed(3)) if world_size > 1 else (fixed(0),):
            both = copy.deepcopy(plain), autopar.compile(copy.deepcopy(plain), strategy=strategy)
            for model in both:
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for _ in range(3):
                    loss, weights = model(X)
                    weights = weights if isinstance(weights, list) else [weights]
                    (loss + sum(0.1 * w.abs().sum() for w in weights)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            torch.testing.assert_close(whole_state(both[1]), both[0].state_dict())


@pytest.mark.parametrize("ranks", [1, 2])
def test_returned_parameters_are_trained(ranks: int) -> None:
    run(penalize, ranks)
