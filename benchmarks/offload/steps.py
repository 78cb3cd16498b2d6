"""Seconds of a step with activations in memory and on storage, step by step in turn.

The contenders are autopar in memory, autopar with activations on storage, and the plain model
under `torch.autograd.graph.saved_tensors_hooks`, which write and read files of the same folder one
by one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from benchmarks.offload.models import Model


def hooked(model: nn.Module, folder: Path) -> Callable[..., Tensor]:
    """The plain model with saved tensors in files, as torch's tutorial has it."""
    numbers = itertools.count()

    def pack(value: Tensor) -> Any:
        if value.nbytes < 64 << 10 or isinstance(value, nn.Parameter):
            return value
        path = folder / f"saved-{next(numbers)}"
        torch.save(value, path)
        return path

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        value = torch.load(kept)
        kept.unlink()
        return value

    def call(*batch: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(*batch)

    return call


def step(call: Callable[..., Tensor], optimizer: Any, batch: Any) -> tuple[float, float]:
    """Seconds and loss of a step."""
    start = time.perf_counter()
    loss = call(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start, loss.item()


def compare(folder: Path, rows: int, width: int, layers: int, rounds: int) -> dict[str, Any]:
    """Median seconds of each contender, and ratios to memory round by round."""
    batch = torch.randn(rows, width), torch.randn(rows, width)
    calls: dict[str, tuple[Any, Any]] = {}
    for name, options in (("memory", {}), ("storage", {"offload": "activations"})):
        strategy = autopar.Strategy(zero=0, recompute="none", offload_dir=str(folder), **options)
        model = autopar.compile(Model(width, layers), strategy=strategy, example_inputs=batch)
        calls[name] = model, torch.optim.SGD(model.parameters(), lr=1e-3)
    plain = Model(width, layers)
    calls["hooks"] = hooked(plain, folder), torch.optim.SGD(plain.parameters(), lr=1e-3)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        losses = {}
        for name, (call, optimizer) in calls.items():
            took, losses[name] = step(call, optimizer, batch)
            if turn:  # the first allocates and compiles
                seconds[name].append(took)
        assert losses["storage"] == losses["memory"], losses
    pairs = {name: zip(own, seconds["memory"], strict=True) for name, own in seconds.items()}
    return {
        "rows": rows,
        "width": width,
        "layers": layers,
        "seconds": {name: statistics.median(own) for name, own in seconds.items()},
        "ratio": {name: statistics.median(a / b for a, b in own) for name, own in pairs.items()},
    }
