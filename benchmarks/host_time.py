"""Host time of a step beside the plain model's: a tiny GPT of 12 layers, one thread, one rank.

With `--ranks 2` the process is rank 0 of a fake world, whose collectives cost their calls alone.
Steps of both models alternate; the ratio is the median over pairs of steps, in CPU time of the
thread that runs them. The kernels of so small a model are part of it on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
from benchmarks.models import GPT

VOCABULARY, WIDTH, ROWS, TOKENS, LAYERS = 64, 16, 2, 8, 12
PARTS = ("forward", "backward")


def seconds_of_step(model: nn.Module, batch: Any) -> tuple[float, float]:
    """CPU time of a forward and of a backward."""
    start = time.thread_time()
    loss = model(*batch)
    middle = time.thread_time()
    loss.backward()
    end = time.thread_time()
    model.zero_grad()
    return middle - start, end - middle


def measure(strategy: str, ranks: int, steps: int) -> dict[str, Any]:
    """Medians in milliseconds and the median ratio of the compiled model to the plain one."""
    torch.manual_seed(0)
    if ranks > 1:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    plain, other = (GPT(LAYERS, VOCABULARY, tied=False, width=WIDTH, heads=2) for _ in range(2))
    compiled = autopar.compile(other, strategy=strategy, example_inputs=(ids, ids))
    for model in (plain, compiled) * 5:
        seconds_of_step(model, (ids, ids))
    gc.collect()
    gc.freeze()
    pairs = [[seconds_of_step(m, (ids, ids)) for m in (plain, compiled)] for _ in range(steps)]
    if ranks > 1:
        dist.destroy_process_group()
    ratios = [sum(ours) / sum(theirs) for theirs, ours in pairs]
    found: dict[str, Any] = {"strategy": strategy, "ranks": ranks}
    for side, name in enumerate(("plain_ms", "autopar_ms")):
        of_parts = zip(*(pair[side] for pair in pairs), strict=True)
        medians = (round(statistics.median(part) * 1e3, 2) for part in of_parts)
        found[name] = dict(zip(PARTS, medians, strict=True))
    return {**found, "ratio": round(statistics.median(ratios), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path, help="adds the result to the list in this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    result = measure(arguments.strategy, arguments.ranks, arguments.steps)
    print(json.dumps(result))
    if arguments.json is not None:
        before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps([*before, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
