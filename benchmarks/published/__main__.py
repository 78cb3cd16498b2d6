"""Published training runs beside autopar's predictions from their configuration alone.

No constant of the cost model comes from these tables; docs/cost-model.md has the source of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

from autopar.core.common.deadline import Deadline
from autopar.core.plan.plan import Plan
from autopar.core.schedules import orders
from autopar.session import offline
from benchmarks.published.planning import NO_CAP, pinned, plan_of
from benchmarks.published.run import Run
from benchmarks.published.tables import read
from benchmarks.report import about, save

SCALE = {"TFLOP/s": 1e12, "tokens/s": 1.0}

OVERLAP_SLOWDOWN = 1.13
"""Slowdown of matrix products beside collectives: vTrain's and Galvatron's default."""


def predict(run: Run) -> dict[str, Any]:
    """Plan a run as published, and compare; `seconds` is the planning time."""
    start = time.perf_counter()
    plan = pinned(run)
    seconds = time.perf_counter() - start
    p = plan.prediction
    assert p is not None
    hidden_s = overlapped(plan, run)
    step_s = p.step_s - hidden_s
    rate = run.work / step_s / run.gpus
    found = rate / SCALE[run.unit] if run.unit in SCALE else activations(plan)
    parts = ("compute_s", "communication_s", "exposed_s", "update_s", "bubble")
    return {
        "name": run.name,
        "unit": run.unit,
        "published": run.published,
        "predicted": found,
        "error": found / run.published - 1.0,
        "step_s": step_s,
        "parts": {**{part: getattr(p, part) for part in parts}, "hidden_s": hidden_s},
        "seconds": seconds,
        "assumed": run.assumed,
        "peak_gib": (p.peak_bytes + run.held_bytes) / 2**30,
        "predicted_reserved_gib": (p.reserved_bytes + run.held_bytes) / 2**30,
        "reserved_gib": run.reserved_gib,
    }


def choose(run: Run, limit_s: float, recipe_s: float = 0.0) -> dict[str, Any]:
    """Compare autopar's own plan of a run with the published layout, pinned.

    The limit, and `seconds`, are process time, so that runs on busy cores repeat. `recipe_s` is the
    step of the published layout; 0 to predict it as a plan of autopar.
    """
    own, seconds = chosen(run, limit_s)
    assert own.prediction is not None
    if not recipe_s:
        recipe = plan_of(run, strategy=run.strategy, memory=NO_CAP).prediction
        assert recipe is not None
        recipe_s = recipe.step_s
    own_s = own.prediction.step_s
    return {
        "name": run.name,
        "recipe_s": recipe_s,
        "own_s": own_s,
        "ratio": own_s / recipe_s,
        "plan": layout(own),
        "needed_bytes": own.prediction.needed_bytes,
        "limit_s": limit_s,
        "looked": own.search.looked if own.search else 0,
        "left_out": own.search.left_out if own.search else 0,
        "seconds": seconds,
    }


def recipes(path: Path) -> dict[tuple[str, str], float]:
    """Return the predicted steps of a file of predictions, by table and name of the run.

    They include what recipes do and plans of autopar do not, such as overlapping tp's messages.
    """
    tables = json.loads(path.read_text())["tables"]
    return {(name, row["name"]): row["step_s"] for name, rows in tables.items() for row in rows}


def chosen(run: Run, limit_s: float) -> tuple[Plan, float]:
    """Return autopar's own plan of a run, and the process time that it took."""
    clocked = partial(Deadline, clock=time.process_time)
    start = time.process_time()
    with patch.object(offline, "Deadline", clocked):
        plan = plan_of(run, strategy="fastest", time_limit_s=limit_s)
    return plan, time.process_time() - start


def layout(plan: Plan) -> str:
    """Return the mesh, the name and the micro-batches of a plan."""
    axes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh if size > 1)
    levels = sorted({level for _, level in plan.recompute if level != "none"})
    stages = sorted({stage for _, stage in plan.zero_stages})
    zero = "ZeRO " + "/".join(map(str, stages))
    again = f"recompute {'/'.join(levels)}" if levels else "nothing recomputed"
    return "; ".join([axes, zero, again, *([str(plan.pipeline)] if plan.pipeline else [])])


def overlapped(plan: Plan, run: Run) -> float:
    """Return the seconds of a step that overlapping collectives of tp with products saves.

    With a piece for each rank of tp, all pieces but one overlap, and products run slower meanwhile.
    Megatron-Core's runs did so, plans of autopar do not.
    """
    p = plan.prediction
    assert p is not None
    if not run.tp_overlap:
        return 0.0
    tp = run.strategy.tp or 1
    traffic = [item for item in p.report_data.traffic if item.axis == "tp"]
    sent_s = sum(count * seconds for item in traffic for _, count, seconds in item.sent)
    overlap_s = sent_s * (1.0 - 1.0 / tp)
    stages, micro = run.strategy.stages_per_rank or 1, run.strategy.micro_batches or 1
    bubble = ((run.strategy.pp or 1) - 1) / (stages * micro)
    return overlap_s / OVERLAP_SLOWDOWN * (1.0 + bubble)


def activations(plan: Plan) -> float:
    """Return the peak GiB of saved activations on the first rank."""
    p, pipeline = plan.prediction, plan.pipeline
    assert p is not None
    if pipeline is None or pipeline.ranks == 1:
        return p.memory["saved"] / 2**30
    order = orders(
        pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.stages_per_rank
    )[0]
    sign = {"F": 1, "B": -1}
    saved = accumulate(sign[each.kind] * p.stages[each.stage].saved_bytes for each in order)
    return max(saved) / 2**30


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("table", type=Path, nargs="+", help="CSV of ../shared/data/training")
    parser.add_argument("--only", nargs="+", default=[""], help="runs whose names contain these")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--choice", action="store_true", help="compare with autopar's own plans")
    parser.add_argument("--recipes", type=Path, help="JSON of recipes' predictions, for --choice")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds to search for these")
    options = parser.parse_args(arguments)
    tables: dict[str, list[dict[str, Any]]] = {}
    steps = recipes(options.recipes) if options.recipes else {}

    def keep() -> None:
        if options.json:
            save(options.json, {**about(), "tables": tables})

    for path in options.table:
        runs = [run for run in read(path) if any(name in run.name for name in options.only)]
        print(f"{path.name}: published, predicted, error; time to plan")
        rows = tables.setdefault(path.stem, [])
        for run in runs:
            if options.choice:
                rows.append(choose(run, options.limit, steps.get((path.stem, run.name), 0.0)))
                keep()
                print(
                    "  {name:22} recipe {recipe_s:7.3f} s, own {own_s:7.3f} s, {ratio:.3f}: {plan} "
                    "({seconds:.0f} s)".format(**rows[-1]),
                    flush=True,
                )
                continue
            row = predict(run)
            rows.append(row)
            keep()
            print(
                "  {name:22} {published:8.1f} {predicted:8.1f} {unit} "
                "{error:+7.1%}  step {step_s:7.3f} s  {seconds:5.1f} s".format(**row),
                flush=True,
            )
        if options.choice:
            print(f"  recipes beaten or met: {sum(row['ratio'] <= 1.0 for row in rows)}")
            continue
        errors = [abs(row["error"]) for row in rows]
        print(f"  mean error {mean(errors):.1%}, worst {max(errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
