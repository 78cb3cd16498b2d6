"""What is sent, by which route and when, timed over an emulated network.

    python -m benchmarks.communication --json FILE
    python -m benchmarks.communication --rates 1gbit --layouts 2x2 --steps 5

Ways of autopar and its peers train the same model, in turn, step by step, in the same processes on
nodes that are network namespaces (`benchmarks.cluster`): bytes and their rate are as on a real
network. Needs root on Linux; the exit status is 77 where nodes cannot be emulated.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import shorten

from rich.console import Console

from benchmarks.cluster import Network, Unavailable, start
from benchmarks.cluster.__main__ import SKIPPED
from benchmarks.cluster.network import bits_per_second
from benchmarks.communication.field import CASES, PLANNED, contenders
from benchmarks.communication.report import Row, Setting, rows, table
from benchmarks.launch import Job, race
from benchmarks.peers import words
from benchmarks.report import document


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
    usual = [name for name in names if name != PLANNED]  # it measures first: a minute or two
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


def settings(args: argparse.Namespace) -> list[Setting]:
    """Return what to run."""
    made = []
    for model in args.models:
        size = sum(p.numel() * p.element_size() for p in CASES[model].build().parameters())
        for layout in args.layouts:
            nodes, each = map(int, layout.split("x"))
            made += [Setting(model, nodes, each, rate, size) for rate in args.rates]
    return made


def start_rank(
    network: Network, each: int, job: Job, rank: int, folder: Path, port: int
) -> subprocess.Popen[bytes]:
    """Start one rank of a race in its node."""
    command = [sys.executable, "-m", "benchmarks.communication.worker", str(folder)]
    environment = {"OMP_NUM_THREADS": str(job.threads), "MASTER_PORT": str(port)}
    log = folder / f"log.{rank}"
    return start(network, command, rank, each, environment=environment, log=log)


def compare(args: argparse.Namespace, setting: Setting, console: Console) -> list[Row]:
    """Run one race and show its table."""
    field = [c for c in contenders(setting.ranks_per_node) if c.name in args.contenders]
    absent = [c for c in field if c.absence()]
    names = tuple(c.name for c in field if c not in absent)
    job = Job(setting.model, setting.ranks, names, args.steps, threads=1, patience=args.patience)
    began = time.monotonic()
    with (
        console.status(str(setting)) as status,
        Network(setting.nodes, setting.rate) as network,
    ):
        starting = partial(start_rank, network, setting.ranks_per_node)
        outcome = race(job, lambda text: status.update(f"{setting}: {text}"), starting)
    outcome["contenders"] += [{"contender": c.name, "error": c.absence()} for c in absent]
    made = rows(setting, field, outcome)
    console.print(table(setting, made))
    console.print(f"{time.monotonic() - began:.0f} s\n")
    return made


def main() -> int:
    """Run every race; return 1 if any contender failed or trained something else."""
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
