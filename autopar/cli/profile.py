"""`autopar profile`: recorded steps of a script, beside the cost model's prediction."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.cli.help_text import JSON, add_command, print_json
from autopar.cli.option_types import steps
from autopar.cli.plain_console import PlainConsole, plain_table
from autopar.cli.script import add_script, launch
from autopar.cost_model.simulator.chrome_trace import (
    chrome_trace,
    slices_of,
    waited,
    write_trace,
)
from autopar.errors import StrategyError
from autopar.formatting import printable
from autopar.session.profiler.profiler import COUNT, FOLDER, REFIT, WARM_STEPS
from autopar.session.profiler.report import Again, Profile, Side, find

_SHOWN = 12  # operators


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "profile",
        "launch a script, record some of its steps and find the bottlenecks",
        "autopar profile train.py --nproc 2 --steps 5",
        usage="autopar profile SCRIPT [--nproc N] [--steps N] [--trace FILE]\n"
        "                       [--refit FILE] [-- ARGUMENTS OF THE SCRIPT]",
        more="Records the operators of every rank, predicts the same step from measurements "
        "of this machine, compares both, and plans again with the recorded times. Operators "
        "compiled by a backend are not recorded. On a GPU, times are launch times.",
    )
    add_script(parser)
    add = parser.add_argument
    add("--steps", type=steps, default=5, help="number of steps to record")
    add("--trace", metavar="FILE", help="file for both timelines, for ui.perfetto.dev")
    add(
        "--refit",
        metavar="FILE",
        help="write the cluster to FILE and the operators' times to the cache, as recorded",
    )
    add("--json", action="store_true", help=JSON)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """`autopar profile`."""
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as folder:
        environment = {FOLDER: folder, COUNT: str(options.steps)}
        if options.refit:
            environment[REFIT] = str(Path(options.refit).resolve())
        status = launch(options.script, options.nproc, options.rest, environment)
        profiles = [Profile.load(path) for path in sorted(Path(folder).glob("rank*.json"))]
    if not profiles:
        raise StrategyError(
            f"{options.script} left nothing to show (exit status {status}). It has to train "
            f"{WARM_STEPS + options.steps + 1} steps of one shape or more on a model from "
            "autopar.compile with backend='eager', not cut into stages (pp)."
        )
    if options.json:
        print_json(document(profiles))
    else:
        show(profiles, PlainConsole(markup=True))
    if options.trace:
        write_trace(options.trace, trace(profiles))
        print(printable(f"wrote {options.trace}: open it in ui.perfetto.dev"), file=sys.stderr)
    return status


def trace(profiles: list[Profile]) -> dict[str, Any]:
    """The predicted timeline above the measured timeline of every rank."""
    sides = {"predicted": profiles[0].predicted}
    sides |= {f"measured, rank {p.rank}": p.measured for p in profiles}
    memory = {"predicted": profiles[0].predicted.memory}
    groups = [slices_of(name, side.events) for name, side in sides.items()]
    flows = (flow for own in groups for flow in waited(own, profiles[0].wait_of))
    return chrome_trace(itertools.chain.from_iterable(groups), memory, flows)


def document(profiles: list[Profile]) -> dict[str, Any]:
    """Figures of the slowest rank and the bottlenecks, for programs; seconds."""
    slowest = max(profiles, key=lambda profile: profile.measured.step_s)
    return {
        "rank": slowest.rank,
        "steps_s": slowest.steps_s,
        **{name: _figures(getattr(slowest, name)) for name in ("measured", "predicted")},
        "figures": dict(slowest.kinds),
        "cluster": slowest.cluster,
        "bottlenecks": [asdict(item) for item in find(profiles)],
        "planned_again": asdict(slowest.again) if slowest.again else None,
    }


def _figures(side: Side) -> dict[str, Any]:
    names = ("step_s", "operators", "waits", "outside_s")
    return {name: getattr(side, name) for name in names}


def show(profiles: list[Profile], console: Console) -> None:
    """Prints the comparison on the slowest rank, and the bottlenecks."""
    slowest = max(profiles, key=lambda profile: profile.measured.step_s)
    measured, predicted = slowest.measured, slowest.predicted
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(slowest.kinds.items()))
    console.print(_overview(slowest), _operators(measured, predicted))
    console.print(f"Figures of the prediction: {kinds}. Collectives: {escape(slowest.cluster)}.")
    found = find(profiles)
    if not found:
        gain = predicted.step_s - slowest.faster["operators"]
        console.print(
            "Nothing holds the step up but computing: operators twice as fast would save "
            f"{_ms(gain)} ms (modelled). A faster device, mixed precision or a compiler "
            "(backend='inductor') would move it."
        )
    for index, item in enumerate(found):
        name = f"Worst bottleneck: {item.name}" if index == 0 else f"Then: {item.name}"
        console.print(f"[bold]{name}[/bold]. {escape(item.why)}.")
        console.print(f"What would move it: {item.advice}.")
    if slowest.again is not None:
        for line in again(slowest.again, measured.step_s):
            console.print(escape(line))


def again(found: Again, measured_s: float) -> Iterator[str]:
    """Sentences on the recorded speed of the machine, and on the plan that would now be chosen."""
    factors = {"operators": found.operators, **found.collectives}
    shown = ", ".join(f"{name} {factor:.2f}" for name, factor in factors.items())
    yield (
        f"Times of what was known before, in these steps: {shown}. With that the step is predicted "
        f"to take {_ms(found.step_s)} ms; it took {_ms(measured_s)}."
    )
    if not found.best:
        yield "The plan was given, so no other was looked for."
    elif found.same:
        yield "The plan would be chosen again."
    else:
        gain = found.step_s / found.best_s - 1.0
        yield (
            f"Another plan would now be chosen: {found.best}, {_ms(found.best_s)} ms, {gain:+.1%} "
            "steps a second (modelled, from figures measured in these steps)."
        )
    if found.kept:
        yield (
            f"Kept: the cluster in {found.kept} (Cluster.load, cluster=...), operators' times in "
            "the cache."
        )
    elif found.best and not found.same:
        yield "To plan so, keep what was shown: --refit FILE, then cluster=Cluster.load(FILE)."


def _overview(profile: Profile) -> Table:
    measured, predicted = profile.measured, profile.predicted
    table = _table(f"one step on rank {profile.rank}, ms")
    table.add_row("step", *_pair(measured.step_s, predicted.step_s))
    operators = [sum(side.operators.values()) for side in (measured, predicted)]
    table.add_row("operators", *_pair(*operators))
    for kind in sorted({*measured.waits, *predicted.waits}):
        waits = measured.waits.get(kind, 0.0), predicted.waits.get(kind, 0.0)
        table.add_row(f"waits for {kind}", *_pair(*waits))
    table.add_row("optimizer and all else", *_pair(measured.outside_s, predicted.outside_s))
    return table


def _operators(measured: Side, predicted: Side) -> Table:
    table = _table("operators by time, ms")
    by_time = sorted(measured.operators, key=lambda name: -measured.operators[name])
    for name in by_time[:_SHOWN]:
        pair = _pair(measured.operators[name], predicted.operators.get(name, 0.0))
        table.add_row(name.removesuffix(".default"), *pair)
    if rest := by_time[_SHOWN:]:
        sides = measured.operators, predicted.operators
        others = [sum(times.get(name, 0.0) for name in rest) for times in sides]
        table.add_row(f"{len(rest)} others", *_pair(*others))
    return table


def _table(title: str) -> Table:
    table = plain_table(title, [""], ("measured", "predicted", "error"))
    table.columns[0].max_width = 42
    return table


def _pair(measured_s: float, predicted_s: float) -> tuple[str, str, str]:
    error = f"{predicted_s / measured_s - 1:+.0%}" if measured_s > 0 else ""
    return _ms(measured_s), _ms(predicted_s), error


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
