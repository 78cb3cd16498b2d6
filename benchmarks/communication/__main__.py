"""Step times and bytes of gradient communication over an emulated network.

    python -m benchmarks.communication --json FILE
    python -m benchmarks.communication --rates 1gbit --layouts 2x2 --steps 5

autopar's strategies and their peers train the same model, in turn, step by step, in the same
processes, on nodes that are network namespaces (`benchmarks.cluster`). Needs root on Linux; the
exit status is 77 where nodes cannot be emulated.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten

from rich.console import Console

from benchmarks.cluster import Network, Unavailable
from benchmarks.cluster.__main__ import SKIPPED
from benchmarks.cluster.network import bits_per_second
from benchmarks.cluster.racing import race_over
from benchmarks.communication.contenders import CASES, PLANNED, contenders
from benchmarks.communication.report import Row, Setting, rows, table
from benchmarks.launch import Job
from benchmarks.peers import words
from benchmarks.report import about, save

WORKER = "benchmarks.communication.worker"


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options, checked."""
    names = [contender.name for contender in contenders(2)]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.communication",
        description="Train over an emulated network, with autopar and its peers, and compare.",
        epilog="contenders: " + ", ".join(names),
    )
    parser.add_argument("--models", type=words, default=list(CASES), metavar="NAMES")
    parser.add_argument("--rates", type=words, default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--layouts", type=words, default=["2x2", "4x1"], help="nodes x ranks")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each contender")
    fast = [name for name in names if name != PLANNED]
    parser.add_argument("--contenders", type=words, default=fast, metavar="NAMES")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--patience", type=float, default=300, help="seconds without progress")
    args = parser.parse_args()
    if unknown := set(args.models) - set(CASES):
        parser.error(f"no such models: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if unknown := set(args.contenders) - set(names):
        parser.error(f"no such contenders: {', '.join(sorted(unknown))}")
    if wrong := [text for text in args.layouts if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text)]:
        parser.error(f"no layouts such as 2x2: {', '.join(wrong)}")
    for rate in args.rates:
        bits_per_second(rate)
    if args.steps < 2:
        parser.error("--steps must be at least 2 for quartiles")
    return args


def settings(args: argparse.Namespace) -> Iterator[Setting]:
    """Yield the settings of all races, the fastest network first."""
    for model in args.models:
        for layout in args.layouts:
            nodes, ranks_per_node = map(int, layout.split("x"))
            for rate in sorted(args.rates, key=bits_per_second, reverse=True):
                yield Setting(model, nodes, ranks_per_node, rate)


def compare(args: argparse.Namespace, setting: Setting, console: Console) -> list[Row]:
    """Run one race and show its table."""
    field = [c for c in contenders(setting.ranks_per_node) if c.name in args.contenders]
    job = Job(
        case=setting.model,
        world_size=setting.ranks,
        contenders=tuple(contender.name for contender in field),
        rounds=args.steps,
        threads=1,
        patience=args.patience,
    )
    title = str(setting)
    with console.status(title) as status, Network(setting.nodes, setting.rate) as network:
        notify = lambda text: status.update(f"{title}: {text}")  # noqa: E731
        outcome = race_over(network, setting.ranks_per_node, WORKER, job, notify)
    made = rows(setting, field, outcome)
    console.print(table(setting, made))
    return made


def main() -> int:
    """Run every race; return 1 if any contender failed or its losses differ."""
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    made: list[Row] = []
    for setting in settings(args):
        try:
            made += compare(args, setting, console)
        except Unavailable as reason:
            print(f"skipped, nodes cannot be emulated here: {reason}", file=sys.stderr)
            return SKIPPED
        if args.json:
            save(args.json, {**about(), "rows": [asdict(row) for row in made]})
    for row in made:
        if row.error:
            title = f"{row.nodes}x{row.ranks_per_node} at {row.rate}, {row.contender}"
            console.print(f"{title}: {shorten(row.error, 400)}", style="red", markup=False)
    return int(any(row.error for row in made))


if __name__ == "__main__":
    sys.exit(main())
