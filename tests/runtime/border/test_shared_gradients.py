"""Parameters of a sum have one tensor as their gradients, each of which is accumulated apart."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.training import Pair, fixed
from tests.harness.worlds import run


class Merged(nn.Module):
    """The weight of an adapter is added to its layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.delta = nn.Parameter(torch.rand(4, 4))
        self.scale, self.shift = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(self.stem(x).tanh(), self.head.weight + self.delta)
        return h.square().mean() + self.scale + self.shift


def accumulate(rank: int, world_size: int, strategy: dict[str, Any], holds_back: bool) -> None:
    pair = Pair(Merged, strategy=fixed(strategy.pop("zero", 0), **strategy))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.rand(4, 4, dtype=torch.float64, generator=generator) for _ in range(3)]
    for model in pair.models:
        for number, batch in enumerate(batches):
            holds = holds_back and model is pair.parallel and number < 2
            with model.no_sync() if holds else contextlib.nullcontext():
                model(batch).backward()
    pair.step()
    pair.check_state()


@pytest.mark.parametrize(
    ("strategy", "holds_back"),
    [
        ({"zero": 3}, True),
        ({"tp": 2}, False),
        ({"tp": 2}, True),
        ({"pp": 2}, False),
        ({"pp": 2, "split_points": ("shift",)}, False),  # the gradient of scale is the loss's own
        ({"pp": 2, "split_points": ("shift",)}, True),
        ({}, True),
    ],
    ids=str,
)
def test_accumulated_gradients(strategy: dict[str, Any], holds_back: bool) -> None:
    run(accumulate, 2, strategy=strategy, holds_back=holds_back)
