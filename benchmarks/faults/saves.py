"""`python -m benchmarks.faults.saves`: kills during saves, one after the other (root)."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.faults import runs
from benchmarks.faults.injection import schedule
from benchmarks.faults.runs import Node, Run
from benchmarks.faults.train import EVERY, STRATEGIES, plain_losses
from benchmarks.faults.warm import Nursery
from benchmarks.report import about, save

STEPS = 12


def kills(strategy: str, count: int, seed: int, limit_s: float) -> dict[str, Any]:
    """Train under so many kills, each during a save; return what they did."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="saves-")))
        run = Run(folder / "run", strategy, 0.0, limit_s)
        stack.enter_context(Nursery(folder / "nursery"))
        stack.enter_context(run)
        # the checkpoint before the first save that is struck may not be lost
        run.schedule(schedule("kill", ["save"] * count, 2 * EVERY, 2, 0, seed))
        problem = run.until_done([Node(2)], STEPS)
        events = run.events()
    found = runs.effects(events)
    return {
        "strategy": strategy,
        "kills": len(found),
        "problem": problem,
        "wrong": len(runs.wrong_losses(events, plain_losses(STEPS))),
        "burnt": runs.burnt(events, run.launches),
        "lost_steps": [each["lost_steps"] for each in found],
        "seconds": [each["seconds"] for each in found],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.saves", description=__doc__)
    add = parser.add_argument
    add("--kills", type=int, default=13, help="under each strategy")
    add("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    add("--limit", type=float, default=600.0, help="seconds after which a run has hung")
    add("--json", type=Path)
    options = parser.parse_args()
    found = []
    for seed, strategy in enumerate(options.strategies):
        found.append(kills(strategy, options.kills, seed, options.limit))
        print(json.dumps(found[-1]), flush=True)
        if options.json:
            save(options.json, {**about(), "every": EVERY, "runs": found})
    lost = [each for run in found for each in run["lost_steps"]]
    seconds = [each for run in found for each in run["seconds"] if each is not None]
    median = statistics.median(seconds) if seconds else float("nan")
    print(f"{len(lost)} kills: at most {max(lost)} steps lost, next step after {median:.1f} s")
    return int(any(each["problem"] or each["wrong"] or each["burnt"] for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
