"""Published training runs beside what autopar predicts of them, from their configuration alone.

    python -m benchmarks.published TABLE.csv --json FILE

Every run is planned by `autopar.plan` for a shipped cluster, with its strategy fixed: the prices
are those of the programs that the plan lowers to. No constant of the cost model comes from these
tables; docs/cost-model.md says where each does come from.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean

import autopar
from autopar.cost_model.cluster import Cluster
from autopar.plan import Plan
from benchmarks.published.gpt import MasterAdamW, make
from benchmarks.published.tables import Run, read
from benchmarks.report import machine, versions


@dataclass(frozen=True)
class Row:
    """A run as published and as predicted.

    Attributes:
        name: of the run.
        unit: of both.
        published: the figure of the source.
        predicted: autopar's.
        error: how much more was predicted, over what was published.
        step_s: the predicted step.
        parts: its seconds, and shares, by what they are spent on.
        seconds: that planning took.
        assumed: what the source does not say.
    """

    name: str
    unit: str
    published: float
    predicted: float
    error: float
    step_s: float
    parts: dict[str, float]
    seconds: float
    assumed: str


def predict(run: Run) -> Row:
    """Plans a run as it was, and compares."""
    start = time.perf_counter()
    model, inputs = make(run.form, run.rows)
    cluster = Cluster.named(run.cluster)
    plan = autopar.plan(
        model,
        run.gpus,
        example_inputs=inputs,
        optimizer=MasterAdamW,
        strategy=run.strategy,
        cluster=Cluster.named(run.cluster, max(1, run.gpus // cluster.ranks_per_node)),
        memory="100000GiB",
        backend="ts",
    )
    seconds = time.perf_counter() - start
    p = plan.prediction
    assert p is not None
    found = activations(plan) if run.unit != "TFLOP/s" else run.flops / p.step_s / run.gpus / 1e12
    parts = {
        "compute_s": p.compute_s,
        "communication_s": p.communication_s,
        "exposed_s": p.exposed_s,
        "update_s": p.update_s,
        "bubble": p.bubble,
    }
    error = found / run.published - 1.0
    return Row(
        run.name, run.unit, run.published, found, error, p.step_s, parts, seconds, run.assumed
    )


def activations(plan: Plan) -> float:
    """GiB that the first stages' rank keeps for backwards, at the most."""
    p = plan.prediction
    assert p is not None
    if not p.stages:
        return p.memory["saved"] / 2**30
    ranks = plan.pipeline.ranks if plan.pipeline else 1
    return sum(s.saved_bytes * s.in_flight for s in p.stages[::ranks]) / 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each run, and the mean error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("table", type=Path, nargs="+", help="CSV of ../shared/data/training")
    parser.add_argument("--only", help="runs whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args(arguments)
    tables: dict[str, list[Row]] = {}
    for path in options.table:
        runs = [run for run in read(path) if not options.only or options.only in run.name]
        print(f"{path.name}: published, predicted, error; time to plan")
        rows = tables.setdefault(path.stem, [])
        for run in runs:
            row = predict(run)
            rows.append(row)
            print(
                f"  {row.name:22} {row.published:8.1f} {row.predicted:8.1f} {row.unit} "
                f"{row.error:+7.1%}  step {row.step_s:7.3f} s  {row.seconds:5.1f} s",
                flush=True,
            )
        errors = [abs(row.error) for row in rows]
        print(f"  mean error {mean(errors):.1%}, worst {max(errors):.1%}")
    if options.json:
        found = {
            "machine": machine(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "tables": {name: [asdict(row) for row in rows] for name, rows in tables.items()},
        }
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
