"""Tensors written in place: their gradients keep the rows of a rank."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import fixed
from tests.harness.worlds import run

WIDTH = 8


class Halves(nn.Module):
    """A key that is written in two parts, as in DeepSeek-V3; the gradient's strides may differ."""

    def __init__(self, axis: int, order: tuple[int, int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.axis, self.order = axis, order

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        shape = list(x.shape)
        shape[self.axis] *= 2
        key = x.new_empty(shape).permute(self.order).contiguous().permute(self.order)
        size = x.shape[self.axis]
        key.narrow(self.axis, 0, size).copy_(left)
        key.narrow(self.axis, size, size).copy_(right)
        return torch.tanh(key).sum()


def trains_alike(rank: int, world_size: int, **options: Any) -> None:
    for axis, order in ((1, (0, 1, 2)), (2, (0, 1, 2)), (2, (0, 2, 1))):
        model, plain = Halves(axis, order).double(), Halves(axis, order).double()
        x = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(1)).double()
        parallel = autopar.compile(model, world_size, strategy=fixed(**options))
        parallel(x).backward()
        plain(x).backward()
        assert parallel.plan is not None
        assert not any("has no rule" in note for note in parallel.plan.notes)
        for name, parameter in plain.named_parameters():
            gradient = dict(parallel.named_parameters())[name].grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(whole, parameter.grad)


@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 3}, {"zero": 0, "micro_batches": 2}])
def test_train_as_on_one_device(options: dict[str, Any]) -> None:
    run(trains_alike, 2, **options)


def test_rows_are_not_gathered() -> None:
    x = torch.zeros(4, 6, WIDTH)
    plan = autopar.plan(
        Halves(2, (0, 1, 2)), 2, example_inputs=(x,), strategy=autopar.Strategy(zero=0)
    )
    assert not any("has no rule" in note for note in plan.notes)
    parameters = sum(p.numel() for p in Halves(2, (0, 1, 2)).parameters())
    assert dict(plan.sent_bytes)["dp"] <= 4 * (parameters + 2)
