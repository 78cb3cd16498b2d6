"""`python -m benchmarks.faults`: faults in every phase of a run, under every kind of plan.

Needs root, for small file systems and networks of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cluster import Network
from benchmarks.faults import runs
from benchmarks.faults.injection import FAULTS, PHASES, schedule
from benchmarks.faults.runs import Node, Run
from benchmarks.faults.train import STRATEGIES, plain_losses
from benchmarks.faults.warm import Nursery
from benchmarks.report import about, empty_table, save, wide_console

PAIRS = (["rendezvous", "step"], ["planning", "save"], ["load"])
"""Phases of the faults of each launch: after a first one at its start come steps and saves."""

STEPS = 16  # of a launch
CUT_S = 8.0  # seconds without a link


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    add = parser.add_argument
    add("--trials", type=int, default=20, help="of each cell")
    add(
        "--faults", nargs="+", choices=list(FAULTS), default=[f for f in FAULTS if f != "link-down"]
    )
    add("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    add("--pause", type=float, default=30.0, help="seconds of SIGSTOP")
    add("--silence", type=int, default=5, help="seconds until a silent node counts as gone")
    add("--limit", type=float, default=300.0, help="seconds after which a launch has hung")
    add("--json", type=Path, help="file of the results; trials that it has are kept")
    options = parser.parse_args()
    losses = plain_losses(STEPS * len(PAIRS))
    cells: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        cells = json.loads(options.json.read_text())["trials"]
    console = wide_console()
    for trial in range(options.trials):
        for fault in options.faults:
            for strategy in options.strategies:
                if done(cells, fault, strategy) > trial:
                    continue
                found = list(trials(fault, strategy, trial, options, losses))
                cells += found
                console.print(fault, strategy, trial, json.dumps(found))
                if options.json:
                    save(options.json, {**about(), "trials": cells})
    console.print(table(cells))
    bad = [each for each in cells if each["problem"] or each["wrong"] or each["burnt"]]
    return 1 if bad else 0


def done(cells: Sequence[dict[str, Any]], fault: str, strategy: str) -> int:
    """Return the number of trials of a fault under a strategy, in each phase."""
    mine = [each for each in cells if (each["fault"], each["strategy"]) == (fault, strategy)]
    return len(mine) // len(PHASES)


def trials(
    fault: str, strategy: str, trial: int, options: argparse.Namespace, losses: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Run one run with a fault in every phase; yield what each did."""
    pause = {"sigstop": options.pause, "link-down": CUT_S}.get(fault, 2.0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        run = Run(folder / "run", strategy, pause, options.limit + 2 * pause)
        run.silence_s = options.silence
        nodes = [Node(2)]
        if fault == "link-down":
            network = stack.enter_context(Network(2))
            nodes = [Node(1, network.namespace(number)) for number in range(2)]
            run.nodes, run.endpoint = (2, 2), f"{network.address(0)}:29400"
        stack.enter_context(Nursery(folder / "nursery"))
        stack.enter_context(run)
        problem, injections = "", []
        for number, phases in enumerate(PAIRS):
            first = STEPS * number
            injections += schedule(fault, list(phases), first + 5, 2, len(injections), trial)
            run.schedule(injections)
            problem = problem or run.until_done(nodes, first + STEPS)
        events = run.events()
        logs = Path(run.folder, "launcher-0").read_text() if problem else ""
        launches = run.launches - sum(
            each["event"] == "fault" and each["fault"] == "sigterm" for each in events
        )
        shared = {
            "strategy": strategy,
            "problem": problem,
            **({"log": logs[-3000:]} if problem else {}),
            "wrong": len(runs.wrong_losses(events, losses)),
            "burnt": runs.burnt(events, launches),
        }
        effects = {each["phase"]: each for each in runs.effects(events)}
        for phase in PHASES:
            missed = {"fault": fault, "phase": phase, "seconds": None, "lost_steps": 0}
            yield {
                **shared,
                **effects.get(phase, missed | {"problem": problem or "did not strike"}),
            }


def table(cells: Sequence[dict[str, Any]]) -> Any:
    """Return a row for each fault and phase."""
    headings = ("trials", "hung or failed", "wrong curve", "attempts burnt", "lost steps, worst")
    drawn = empty_table("faults", "fault in phase", (*headings, "next good step, s", "worst, s"))
    for fault in FAULTS:
        for phase in PHASES:
            mine = [each for each in cells if (each["fault"], each["phase"]) == (fault, phase)]
            if not mine:
                continue
            seconds = [each["seconds"] for each in mine if each["seconds"] is not None]
            lost = max(each["lost_steps"] for each in mine)
            over = " TOO MANY" if lost > runs.allowed_loss(fault) else ""
            drawn.add_row(
                f"{fault} in {phase}",
                str(len(mine)),
                str(sum(bool(each["problem"]) for each in mine)),
                str(sum(bool(each["wrong"]) for each in mine)),
                str(sum(each["burnt"] for each in mine)),
                f"{lost}{over}",
                f"{statistics.median(seconds):.1f}" if seconds else "",
                f"{max(seconds):.1f}" if seconds else "",
            )
    return drawn


if __name__ == "__main__":
    raise SystemExit(main())
