"""autopar beside its peers, step by step in the same processes.

python -m benchmarks.peers --models gpt --world-sizes 2 --contenders ddp,autopar-ddp
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten

from rich.console import Console

from benchmarks.contenders import CONTENDERS, field
from benchmarks.launch import Job, race
from benchmarks.models import CASES
from benchmarks.report import Row, about, rows, save, table, wide_console


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Train with autopar and with its peers, interleaved, and compare.",
        epilog="contenders: " + ", ".join(contender.name for contender in CONTENDERS),
    )
    parser.add_argument("--models", type=words, default=list(CASES), metavar="NAMES")
    parser.add_argument("--world-sizes", type=words, default=["1", "2", "4"], metavar="NUMBERS")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each contender")
    usual = [contender.name for contender in CONTENDERS if not contender.only_named]
    parser.add_argument(
        "--contenders", type=words, default=usual, metavar="NAMES", help="only these"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--patience", type=float, default=600, help="seconds without progress before giving up"
    )
    args = parser.parse_args()
    if unknown := set(args.models) - set(CASES):
        parser.error(f"no such models: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if unknown := set(args.contenders) - {contender.name for contender in CONTENDERS}:
        parser.error(f"no such contenders: {', '.join(sorted(unknown))}")
    if not all(size.isdecimal() and int(size) for size in args.world_sizes):
        parser.error("--world-sizes takes positive numbers")
    if args.steps < 2:
        parser.error("--steps must be at least 2 for quartiles")
    return args


def compare(args: argparse.Namespace, model: str, world_size: int, console: Console) -> list[Row]:
    title = f"{model}, {world_size} process" + ("es" if world_size > 1 else "")
    entries = field(CASES[model], world_size, args.contenders)
    absent = [entry for entry in entries if entry.absence()]
    job = Job(
        case=model,
        world_size=world_size,
        contenders=tuple(entry.name for entry in entries if entry not in absent),
        rounds=args.steps,
        threads=max(1, (os.cpu_count() or 1) // world_size),
        patience=args.patience,
    )
    with console.status(title) as status:
        outcome = race(job, lambda text: status.update(f"{title}: {text}"))
    outcome["contenders"] += [{"contender": e.name, "error": e.absence()} for e in absent]
    made = rows(model, world_size, entries, outcome)
    console.print(table(title, made))
    return made


def main() -> int:
    """Run every race; return 1 if any contender failed or its losses differ."""
    args = parse_arguments()
    console = wide_console()
    made: list[Row] = []
    for model in args.models:
        for world_size in map(int, args.world_sizes):
            made += compare(args, model, world_size, console)
            if args.json:
                save(args.json, {**about(), "rows": [asdict(row) for row in made]})
    for row in made:
        if row.error:
            title = f"{row.model}, world size {row.world_size}, {row.contender}"
            text = f"{title}: {shorten(row.error, 400)}"  # complete in the JSON file
            console.print(text, style="red", highlight=False, markup=False)
    absent = {contender.name for contender in CONTENDERS if contender.absence()}
    return int(any(row.error and row.contender not in absent for row in made))


if __name__ == "__main__":
    sys.exit(main())
