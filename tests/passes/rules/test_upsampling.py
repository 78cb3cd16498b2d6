"""Upsampled images stay on the ranks of their rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from tests.harness.training import fixed
from tests.harness.worlds import run


class Decoder(nn.Module):
    """A U-Net's way up: convolutions of a wider image."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        wide = F.interpolate(self.before(x), scale_factor=2, mode=self.mode)
        return self.after(wide).square().mean()


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_rows_are_not_gathered(mode: str, precision: str | None) -> None:
    model = Decoder(mode)
    plan = autopar.plan(
        model, 4, example_inputs=(torch.zeros(8, 3, 16, 16),), strategy=fixed(), precision=precision
    )
    parameters = sum(p.numel() for p in model.parameters())
    assert dict(plan.sent_bytes)["dp"] <= 2 * 4 * (parameters + 2)


def trains_alike(rank: int, world_size: int, **options: Any) -> None:
    for mode in ("nearest", "bilinear", "bicubic"):
        model, plain = Decoder(mode).double(), Decoder(mode).double()
        x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()
        parallel = autopar.compile(model, world_size, strategy=fixed(**options))
        parallel(x).backward()
        plain(x).backward()
        for name, parameter in plain.named_parameters():
            gradient = dict(parallel.named_parameters())[name].grad
            whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            torch.testing.assert_close(whole, parameter.grad)


@pytest.mark.parametrize("options", [{"zero": 0}, {"zero": 3}, {"tp": 2}])
def test_train_as_on_one_device(options: dict[str, Any]) -> None:
    run(trains_alike, 2, **options)
