"""One rank: `python -m benchmarks.stage_messages.worker PP ZERO ROUNDS FILE`."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.before import NAME

VERSIONS = {"before": NAME, "after": "autopar"}
"""Packages of the two versions."""

WIDTH, BLOCKS, ROWS, MICRO_BATCHES = 768, 8, 64, 8


class Model(nn.Module):
    """Linear blocks with residuals: many bytes of parameters for little work."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x.square().mean()


def compiled(version: str, pp: int, zero: int) -> Any:
    """The model under one version, every rank with one stage."""
    package = importlib.import_module(VERSIONS[version])
    strategy = package.Strategy(
        zero=zero,
        pp=pp,
        micro_batches=MICRO_BATCHES,
        schedule="1f1b",
        split_points=tuple(f"blocks.{BLOCKS * index // pp}" for index in range(1, pp)),
        recompute="none",
        gather_bytes=1 << 20,
        reduce_bytes=1 << 20,
        prefetch=1,
        hierarchical=False,
    )
    torch.manual_seed(0)
    example = (torch.randn(ROWS, WIDTH),)
    return package.compile(Model(), strategy=strategy, example_inputs=example, fallback=False)


def main() -> None:
    """Trains both versions in turn, and writes times and losses on rank 0."""
    pp, zero, rounds, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    models = {version: compiled(version, pp, zero) for version in VERSIONS}
    optimizers = {v: torch.optim.SGD(m.parameters(), lr=0.01) for v, m in models.items()}
    times: dict[str, list[float]] = {version: [] for version in VERSIONS}
    losses: dict[str, list[float]] = {version: [] for version in VERSIONS}
    for step in range(rounds + 2):
        batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        for version, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            loss = model(batch)
            loss.backward()
            seconds = torch.tensor(time.perf_counter() - start)
            optimizers[version].step()
            optimizers[version].zero_grad()
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            losses[version].append(loss.item())
            if step >= 2:  # the first steps connect ranks and allocate
                times[version].append(seconds.item())
    if dist.get_rank() == 0:
        share = BLOCKS // pp * (WIDTH + 1) * WIDTH * 4
        data_parallel = dist.get_world_size() // pp
        pairs = zip(*losses.values(), strict=True)
        answer = {
            **times,
            # ZeRO 2 reduces in each micro-batch, and gathers once
            "sent_bytes": (1 + (MICRO_BATCHES if zero == 2 else 1))
            * share
            * (data_parallel - 1)
            / data_parallel,
            "loss_difference": max(abs(one - other) for one, other in pairs),
        }
        Path(path).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
