"""A loop combines values of the model with sharded parameters: gradients are one device's.

Where shapes are equal, autograd gives the value a sharded gradient.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.harness.training import Pair, fixed
from tests.harness.worlds import run

Returned = tuple[Tensor, Tensor, Tensor]


class Net(nn.Module):
    """Returns a loss, a tensor of the shape of its first weight, and rows of this shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Returned:
        h = self.last(self.first(x).tanh())
        return h.square().mean(), self.first.weight * 2, h


def whole(model: nn.Module, returned: Returned) -> Tensor:
    return (returned[1] - model.first.weight).square().sum()


def rows(model: nn.Module, returned: Returned) -> Tensor:
    return (returned[2] - model.first.weight).square().mean()


def slope(model: nn.Module, returned: Returned) -> Tensor:
    """The gradient of the penalty reaches a gradient as a shard."""
    weight = model.first.weight
    (gradient,) = torch.autograd.grad(returned[0], weight, create_graph=True)
    return ((weight.detach() - gradient) * weight).sum()


PENALTIES = {"whole": whole, "rows": rows, "slope": slope}


def compare(rank: int, world_size: int, batch: str, zero: int, tp: int, penalty: str) -> None:
    strategy = fixed(zero, tp=tp)
    pair = Pair(Net, strategy=strategy, batch=batch, rows=0 if batch == "local" else None)
    x = torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for model in pair.models:
        takes_share = batch == "local" and model is pair.parallel
        returned = model(x[rank::world_size] if takes_share else x)
        (returned[0] + PENALTIES[penalty](model, returned)).backward()
    pair.check_gradients()


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize(("zero", "tp"), [(3, 1), (0, 2)])
def test_replicated_border(penalty: str, zero: int, tp: int) -> None:
    run(compare, 2, batch="global", zero=zero, tp=tp, penalty=penalty)


@pytest.mark.parametrize("penalty", ["whole", "slope"])
def test_border_of_ddp(penalty: str) -> None:
    run(compare, 2, batch="local", zero=3, tp=1, penalty=penalty)
