"""Plans to draw: for machines that are not there, each made once."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.core.ir.placement import Shard
from autopar.cost_model.cluster.cluster import Cluster

WIDTH, ROWS = 256, 64


class Tower(nn.Module):
    """Layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(4)]
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(WIDTH, 2 * WIDTH, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x).square().mean()


STRATEGIES = {
    "data": (autopar.Strategy(), "4GiB"),
    "sharded": (
        autopar.Strategy(
            zero=3, tp=2, recompute="none", placements={"*.weight": Shard(0), "*.bias": Shard(0)}
        ),
        None,
    ),
    "stages": (autopar.Strategy(pp=4, micro_batches=4, schedule="1f1b", zero=0), None),
    "fixed": (
        autopar.Strategy(
            zero=3, recompute="none", gather_bytes=2**20, reduce_bytes=2**20, prefetch=1
        ),
        None,
    ),
}


@cache
def planned(name: str) -> autopar.Plan:
    """With "fixed", nothing is left to choose and no cluster is given, so nothing is predicted."""
    strategy, memory = STRATEGIES[name]
    return autopar.plan(
        Tower(),
        8,
        example_inputs=(torch.empty(ROWS, WIDTH, device="meta"),),
        strategy=strategy,
        memory=memory,
        cluster=Cluster.named("dgx-h100", 1) if name != "fixed" else None,
    )
