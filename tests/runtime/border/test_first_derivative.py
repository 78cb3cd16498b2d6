"""A gradient without derivative says so, by whatever it is differentiated."""

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from tests.harness.training import fixed
from tests.harness.worlds import run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()


def differentiated_again(rank: int, world_size: int) -> None:
    strategy = fixed(0, pp=2, schedule="1f1b", micro_batches=2)
    model = autopar.compile(Net().double(), strategy=strategy, fallback=False)
    x = torch.rand(4, 4, dtype=torch.float64, requires_grad=True)
    for other in (x, model.blocks[rank].weight):
        (first,) = torch.autograd.grad(model(x), x, create_graph=True)
        with pytest.raises(CaptureError, match="a pipeline has no second derivative"):
            torch.autograd.grad(first.sum(), other, allow_unused=True)
    model(x).backward()  # the ranks are still together


def test_pipelines() -> None:
    run(differentiated_again, 2)
