"""Predicted steps of a pipeline under each schedule, on a shipped cluster.

    python -m benchmarks.prediction.schedules --cluster dgx-h100 --nodes 4 --pp 4 --json FILE

The model is a GPT on the meta device. Stages lie on nodes, with data parallelism within each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import autopar
from autopar.core.plan.pipeline import SCHEDULES
from benchmarks.published import gpt
from benchmarks.report import about, empty_table, save, wide_console


def main() -> int:
    """Prices all schedules at each number of micro-batches."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction.schedules")
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    given = parser.parse_args()
    rows = [
        priced(given, schedule, count) for count in given.micro_batches for schedule in SCHEDULES
    ]
    columns = ("micro-batches", "step, ms", "waits", "memory, GB")
    drawn = empty_table(f"{given.layers} blocks, pp {given.pp}", "schedule", columns)
    for row in rows:
        ms, share, gb = 1e3 * row["step_s"], 100 * row["idle"], row["peak_bytes"] / 1e9
        cells = f"{ms:.1f}", f"{share:.1f} %", f"{gb:.1f}"
        drawn.add_row(row["schedule"], str(row["micro_batches"]), *cells)
    wide_console().print(drawn)
    if given.json is not None:
        before = json.loads(given.json.read_text())["rows"] if given.json.exists() else []
        save(given.json, {**about(), "rows": [*before, *rows]})
    return 0


def priced(given: argparse.Namespace, schedule: Any, micro_batches: int) -> dict[str, Any]:
    """The plan under one schedule: step, mean share of waits, and memory of the fullest rank."""
    cluster = autopar.Cluster.named(given.cluster, given.nodes)
    copies = cluster.world_size // given.pp
    sizes = gpt.Sizes(given.width, given.layers, 32, 50304, 2048, flash=True, dropout=False)
    model, inputs = gpt.make(sizes, copies * micro_batches)
    strategy = autopar.Strategy(
        pp=given.pp,
        micro_batches=micro_batches,
        schedule=schedule,
        zero=1,
        recompute="none",
        gather_bytes=1 << 26,
        reduce_bytes=1 << 26,
    )
    start = time.perf_counter()
    plan = autopar.plan(
        model, cluster.world_size, example_inputs=inputs, strategy=strategy, cluster=cluster
    )
    assert plan.prediction is not None
    idle = plan.prediction.idle
    return {
        "cluster": cluster.name,
        "pp": given.pp,
        "layers": given.layers,
        "width": given.width,
        "schedule": schedule,
        "micro_batches": micro_batches,
        "step_s": plan.prediction.step_s,
        "idle": sum(idle) / len(idle),
        "peak_bytes": plan.prediction.peak_bytes,
        "planning_s": time.perf_counter() - start,
    }


if __name__ == "__main__":
    sys.exit(main())
