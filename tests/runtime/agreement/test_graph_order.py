"""Ranks that trace the same operators in another order train under one order."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import autopar
from tests.harness.training import fixed, whole
from tests.harness.worlds import run


class Unordered(nn.Module):
    """Computes two tables in the order of `names`, as over a set of strings, and uses both.

    The tables have the same operators, so their nodes have the same names in either order.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names, self.up, self.down = names, nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("left", torch.rand(8))
        self.register_buffer("right", torch.rand(8))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tables = {}
        for name in self.names:
            table = getattr(self, name)
            tables[name] = (table.cos(), table.sin()) if name == "left" else (table.sin(),)
        y = self.up(x) * tables["left"][0] + tables["left"][1]
        return (self.down(y.relu() * tables["right"][0])).square().mean()


def batch() -> Tensor:
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(0)).double()


def gradients(model: Any) -> list[Tensor]:
    model(batch()).backward()
    return [whole(p.grad) for p in model.parameters()]


def on_rank(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    order = ("left", "right") if rank else ("right", "left")
    assert dist.get_rank() == rank
    return gradients(autopar.compile(Unordered(order), strategy=fixed(**options), fallback=False))


@pytest.mark.parametrize("options", [{"zero": 3}, {"tp": 2}, {"micro_batches": 2}], ids=str)
def test_another_order_of_operators_trains_as_one_process(options: dict[str, Any]) -> None:
    want = gradients(Unordered(("left", "right")))
    for found in run(on_rank, 2, options=options):
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
