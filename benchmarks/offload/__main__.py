"""`python -m benchmarks.offload FOLDER`: one process, the contenders step by step in turn.

The contenders are autopar in memory, autopar with activations on storage, and the plain model
under `torch.autograd.graph.saved_tensors_hooks`, which write and read files of the same folder one
by one. The first column is the median step, the second the median ratio to memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import autopar


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks of one width, and a squared error."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


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


def main() -> None:
    """Prints and writes the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder on the storage")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="also write JSON to this file")
    options = parser.parse_args()
    sizes = options.rows, options.width, options.layers
    found = compare(options.folder, *sizes, options.rounds) | {"torch": str(torch.__version__)}
    for name, seconds in found["seconds"].items():
        print(f"{name:8} {seconds * 1e3:8.1f} ms  {found['ratio'][name]:.2f} x memory")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
