"""When collectives are issued and waited for, timed over an emulated network.

    python -m benchmarks.overlap --rates 1gbit,300mbit --json FILE

Models train under one plan with three schedules, in turn, step by step, in the same processes on
two nodes that are network namespaces (`benchmarks.cluster`): collectives issued where they are
needed and waited for at once, gathers one bucket ahead, and as planned, which is one of these if
no other is predicted to be faster. Beside them stand the model alone on its rows, and the bound:
the larger of that and of the bytes over the link, and what data dependence forces to be exposed.
Needs root on Linux; the exit status is 77 where nodes cannot be emulated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.plan.overlap import Overlap
from autopar.report.plan import Plan
from benchmarks.cluster import Network, Unavailable
from benchmarks.cluster.__main__ import SKIPPED
from benchmarks.cluster.network import bits_per_second
from benchmarks.cluster.ranks import launch
from benchmarks.communication.counters import sent_bytes
from benchmarks.models import GPT, next_tokens
from benchmarks.report import document

PAYLOAD = 1448 / 1514  # of a frame
WARM_STEPS = 3
BUCKET_BYTES = 3 << 20  # about a layer
Run = Callable[[Tensor, Tensor], None]


class Chain(nn.Module):
    """Square layers, one behind the other, each of which needs the one before."""

    def __init__(self, layers: int = 8, width: int = 768) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - y).square().mean()


def chain_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, 1536, 768, generator=generator)
    return x[0], x[1]


GPT_CASE = partial(GPT, 6, 256), partial(next_tokens, rows=16, vocabulary=256)
Entry = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]], dict[str, Any]]
MODELS: dict[str, Entry] = {
    "chain": (Chain, chain_batch, {"zero": 3}),
    "gpt": (*GPT_CASE, {"zero": 3}),
    "gpt+int8": (*GPT_CASE, {"zero": 0, "compress": "int8"}),
}
"""A model, its batches, and what its strategy fixes. What is compressed goes in chains: an
exchange, a sum of what came, a gather."""


def variants(plan: Plan) -> dict[str, Plan]:
    """The plan under each schedule."""
    planned = plan.overlaps[0] if plan.overlaps else Overlap()
    counts = (planned.gather, planned.regather, planned.reduce)
    at_once = Overlap(*((0.0,) * len(own) for own in counts))
    return {
        "at once": replace(plan, overlaps=(at_once,), prefetch=0, in_flight=1),
        "one ahead": replace(plan, overlaps=(), prefetch=1),
        "planned": plan,
    }


def rank_main(name: str, steps: int, file: Path) -> None:
    """One rank: times the forward and backward of every schedule, in turn."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    make, batch, fixed = MODELS[name]

    def built() -> nn.Module:
        torch.manual_seed(0)
        return make()

    sizes = {"gather_bytes": BUCKET_BYTES, "reduce_bytes": BUCKET_BYTES}
    strategy = autopar.Strategy(recompute="none", **sizes, **fixed)
    options: dict[str, Any] = {"example_inputs": batch(0), "fallback": False}
    model = autopar.compile(built(), strategy=strategy, memory="64GiB", **options)
    plans = variants(model.plan)
    runs = {key: _run(autopar.compile(built(), plan=p, **options)) for key, p in plans.items()}
    rank, alone = dist.get_rank(), built()
    mine = partial(_rows, rank=rank, ranks=dist.get_world_size())
    runs["alone"] = lambda x, y: _train(alone, mine(x), mine(y))
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    sent: dict[str, list[int]] = {key: [] for key in runs}
    for step in range(WARM_STEPS + steps):
        for key, run in runs.items():
            dist.barrier()
            before, start = sent_bytes(), time.perf_counter()
            run(*batch(step))
            taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            sent[key].append(sent_bytes() - before)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if step >= WARM_STEPS:
                seconds[key].append(taken.item())
    if rank == 0:
        p = model.plan.prediction
        assert p is not None
        found = {
            "seconds": seconds,
            "sent_bytes": median(sent["planned"]),
            "predicted_s": p.step_s - p.update_s,
            "predicted_causes": dict(p.causes),
            "overlap": [vars(item) for item in model.plan.overlaps],
            "plan": model.plan.name,
            "others": [(o.name, o.step_s - p.update_s) for o in model.plan.runners_up],
        }
        file.write_text(json.dumps(found))
    dist.destroy_process_group()


def _run(model: nn.Module) -> Run:
    return partial(_train, model)


def _train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    model(x, y).backward()
    model.zero_grad()


def _rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks)[rank]


def race(name: str, rate: str, steps: int) -> dict[str, Any]:
    """One table's figures."""
    with tempfile.TemporaryDirectory() as folder, Network(2, rate) as network:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "benchmarks.overlap", "--rank", str(file)]
        command += ["--models", name, "--steps", str(steps)]
        threads = {"OMP_NUM_THREADS": "1"}
        launch(network, command, 1, environment=threads, logs=Path(folder), timeout_s=280)
        found = json.loads(file.read_text())
    link_s = found["sent_bytes"] * 8 / (bits_per_second(rate) * PAYLOAD)
    alone_s = median(found["seconds"]["alone"])
    forced_s = found["predicted_causes"].get("data dependence", 0.0)
    bound_s = max(alone_s, link_s) + forced_s
    rows = {}
    for key, taken in found["seconds"].items():
        ratios = [a / b for a, b in zip(taken, found["seconds"]["at once"], strict=True)]
        low, middle, high = quantiles(taken, n=4)
        of_bound, of_plain = middle / bound_s, median(ratios)
        rows[key] = {
            "median_s": middle, "quartiles_s": [low, high],
            "by_bound": of_bound, "by_at_once": of_plain,
        }  # fmt: skip
    shown = {"model": name, "rate": rate, "link_s": link_s, "bound_s": bound_s, "rows": rows}
    return {**shown, **{k: v for k, v in found.items() if k != "seconds"}}


def table(found: dict[str, Any]) -> Table:
    """The figures of a race."""
    grid = Table(title=f"{found['model']}, 2 nodes at {found['rate']}: {found['plan']}")
    for column in ("schedule", "ms", "quartiles", "by at once", "by bound"):
        grid.add_column(column, justify="left" if column == "schedule" else "right")
    for key, row in found["rows"].items():
        low, high = (f"{s * 1e3:.0f}" for s in row["quartiles_s"])
        figures = [f"{row['median_s'] * 1e3:.0f}", f"{low} - {high}"]
        grid.add_row(key, *figures, f"{row['by_at_once']:.2f}", f"{row['by_bound']:.2f}")
    grid.caption = (
        f"bytes over the link {found['link_s'] * 1e3:.0f} ms, bound {found['bound_s'] * 1e3:.0f}, "
        f"predicted {found['predicted_s'] * 1e3:.0f}"
    )
    return grid


def main() -> int:
    """Run every race."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rates", default="1gbit,300mbit")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options.models, options.steps, options.rank)
        return 0
    console, made = Console(width=None if os.isatty(1) else 120), []
    for name in options.models.split(","):
        for rate in options.rates.split(","):
            try:
                made.append(race(name, rate, options.steps))
            except Unavailable as reason:
                print(f"skipped, nodes cannot be emulated here: {reason}", file=sys.stderr)
                return SKIPPED
            console.print(table(made[-1]))
            if options.json:
                shown = {**document([]), "rows": made}
                options.json.write_text(json.dumps(shown, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
