"""What is sent, by which route and when, timed over an emulated network.

    python -m benchmarks.communication --json FILE
    python -m benchmarks.communication --rates 1gbit --layouts 2x2 --steps 5

Strategies of autopar and its peers train the same model, in turn, step by step, in the same
processes on nodes that are network namespaces (`benchmarks.cluster`): bytes and their rate are as
on a real network. Needs root on Linux; the exit status is 77 where nodes cannot be emulated.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten

from rich.console import Console

from benchmarks.cluster import Network, Unavailable
from benchmarks.cluster.__main__ import SKIPPED
from benchmarks.cluster.network import bits_per_second
from benchmarks.cluster.racing import race_over
from benchmarks.communication.field import CASES, PLANNED, contenders
from benchmarks.communication.report import Row, Setting, parts, rows, table
from benchmarks.communication.worker import NetworkJob
from benchmarks.peers import words
from benchmarks.report import document

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
    slow = (PLANNED, "horovod+fp16")  # one measures first, the other connects anew at every turn
    usual = [name for name in names if name not in slow]
    parser.add_argument("--contenders", type=words, default=usual, metavar="NAMES")
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
        parser.error("--steps must be 2 at least: there are quartiles to show")
    return args


def races(args: argparse.Namespace) -> list[list[Setting]]:
    """Return the settings, those together that differ in rate alone: the fastest first.

    What is planned for a rate is not raced at another.
    """
    rates = sorted(args.rates, key=bits_per_second, reverse=True)
    made = []
    for model in args.models:
        size = sum(p.numel() * p.element_size() for p in CASES[model].build().parameters())
        for layout in args.layouts:
            nodes, each = map(int, layout.split("x"))
            own = [Setting(model, nodes, each, rate, size) for rate in rates]
            made += [[one] for one in own] if PLANNED in args.contenders else [own]
    return made


def compare(args: argparse.Namespace, settings: list[Setting], console: Console) -> list[Row]:
    """Run one race, at every rate, and show its tables."""
    first, each = settings[0], settings[0].ranks_per_node
    field = [c for c in contenders(each) if c.name in args.contenders]
    absent = [c for c in field if c.absence()]
    job = NetworkJob(
        case=first.model,
        world_size=first.ranks,
        contenders=tuple(c.name for c in field if c not in absent),
        rounds=args.steps * len(settings),
        threads=1,
        patience=args.patience,
        rates=tuple(setting.rate for setting in settings),
    )
    title = f"{first.model}, {first.nodes}x{each}"
    with console.status(title) as status, Network(first.nodes, first.rate) as network:

        def tell(text: str) -> None:
            status.update(f"{title}: {text}")

        outcome = race_over(network, each, WORKER, job, tell)
    outcome["contenders"] += [{"contender": c.name, "error": c.absence()} for c in absent]
    made = []
    for setting, part in zip(settings, parts(outcome, len(settings)), strict=True):
        own = rows(setting, field, part)
        console.print(table(setting, own))
        made += own
    return made


def main() -> int:
    """Run every race; return 1 if any contender failed or trained something else."""
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    made: list[Row] = []
    for settings in races(args):
        began = time.monotonic()
        try:
            made += compare(args, settings, console)
        except Unavailable as reason:
            print(f"skipped, nodes cannot be emulated here: {reason}", file=sys.stderr)
            return SKIPPED
        console.print(f"{time.monotonic() - began:.0f} s\n")
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            shown = {**document([]), "rows": [asdict(row) for row in made]}
            args.json.write_text(json.dumps(shown, indent=1) + "\n")
    for row in made:
        if row.error:
            where = f"{row.nodes}x{row.ranks_per_node} at {row.rate}, {row.contender}"
            console.print(f"{where}: {shorten(row.error, 400)}", style="red", markup=False)
    absent = {contender.name for contender in contenders(1) if contender.absence()}
    return int(any(row.error and row.contender not in absent for row in made))


if __name__ == "__main__":
    sys.exit(main())
