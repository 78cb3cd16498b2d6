"""How much longer a step takes under the plan chosen than under the best of all.

    python -m benchmarks.regret --json FILE
    python -m benchmarks.regret --cases deep --clusters 2x1 --rates 1gbit --steps 5

On an emulated cluster (`benchmarks.cluster`) an enumeration of plans, peers, and the plan that the
planner chooses under each cap train the same model in turn, step by step, in the same processes.
Each race is written as soon as it is over; those that are in FILE are not run again. Needs root on
Linux; the exit status is 77 where nodes cannot be emulated.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console

from autopar.cost_model.disk_cache import cache_directory
from benchmarks.cluster import Network, Unavailable
from benchmarks.cluster.__main__ import SKIPPED
from benchmarks.cluster.network import bits_per_second
from benchmarks.cluster.racing import race_over
from benchmarks.peers import words
from benchmarks.regret.field import Layout
from benchmarks.regret.report import overview, table
from benchmarks.regret.score import entries, summary, verdict
from benchmarks.regret.worker import RegretJob, names
from benchmarks.report import machine, versions

CLUSTER = r"[1-9]\d*x[1-9]\d*(@.+)?"

WORKER = "benchmarks.regret.worker"

INFEASIBLE = ("OutOfMemoryError", "StrategyError", "BatchError", "CaptureError")
"""What may be wrong with a plan of the enumeration: it is none for this model."""


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regret",
        description="Measure every plan of an enumeration, peers, and the plan chosen.",
    )
    parser.add_argument("--models", default="benchmarks.regret.models", metavar="MODULE")
    parser.add_argument("--cases", type=words, default=[], metavar="NAMES", help="of the models")
    parser.add_argument(
        "--clusters",
        type=words,
        default=["2x1", "4x1", "2x2", "1x4"],
        help="nodes x ranks, such as 2x2; 2x2@1gbit for that rate alone",
    )
    parser.add_argument("--rates", type=words, default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--caps", type=words, default=["none", "0.7"], help="shares of DDP's need")
    parser.add_argument("--contenders", type=words, default=[], metavar="NAMES", help="only these")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each contender")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds of a race")
    parser.add_argument("--json", type=Path, metavar="FILE", help="read, go on, write")
    parser.add_argument("--cache", type=Path, default=cache_directory() / "regret")
    parser.add_argument("--patience", type=float, default=300, help="seconds without progress")
    args = parser.parse_args()
    known = importlib.import_module(args.models).CASES
    args.cases = args.cases or list(known)
    if unknown := set(args.cases) - set(known):
        parser.error(f"no such models: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if wrong := [text for text in args.clusters if not re.fullmatch(CLUSTER, text)]:
        parser.error(f"no clusters such as 2x2 or 2x2@1gbit: {', '.join(wrong)}")
    for _, _, rate in races(args):
        bits_per_second(rate)
    args.caps = tuple(None if cap == "none" else float(cap) for cap in args.caps)
    return args


def races(args: argparse.Namespace) -> Iterator[tuple[str, Layout, str]]:
    """Yield model, layout and rate of each race; a single node has no links to have a rate."""
    for text in args.clusters:
        cluster, _, own = text.partition("@")
        layout, rates = Layout.of(cluster), [own] if own else args.rates
        for rate in rates if layout.nodes > 1 else rates[:1]:
            for model in args.cases:
                yield model, layout, rate


def run(
    args: argparse.Namespace, model: str, layout: Layout, rate: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Run one race and return its outcome, with what it is of."""
    case = importlib.import_module(args.models).CASES[model]
    everyone = names(case, layout, args.caps)
    job = RegretJob(
        case=model,
        world_size=layout.ranks,
        contenders=tuple(n for n in everyone if n in (args.contenders or everyone)),
        rounds=args.steps,
        threads=1,
        patience=args.patience,
        module=args.models,
        layout=str(layout),
        caps=args.caps,
        limit_s=args.limit_s,
    )
    began = time.monotonic()
    with Network(layout.nodes, rate) as network:
        environment = {"AUTOPAR_CACHE": str(args.cache)}
        outcome = race_over(network, layout.ranks_per_node, WORKER, job, tell, environment)
    facts = {"model": model, "cluster": str(layout), "rate": rate if layout.nodes > 1 else ""}
    own = {"caps": args.caps, "took_s": time.monotonic() - began, "commit": versions()["commit"]}
    return {**facts, **own, **outcome}


@contextlib.contextmanager
def progress(console: Console, title: str) -> Iterator[Callable[[str], None]]:
    """Give what is told of a race: on a terminal shown in place, else written as lines."""
    began = time.monotonic()
    with console.status(title) as status:

        def tell(text: str) -> None:
            status.update(f"{title}: {text}")
            if not console.is_terminal:
                print(f"{time.monotonic() - began:5.0f} s {title}: {text}", file=sys.stderr)

        yield tell


def kept(path: Path | None) -> list[dict[str, Any]]:
    """Return the races that a file already has."""
    if path is None or not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text())["races"]
    return found


def key(race: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what tells a race from others."""
    return race["model"], race["cluster"], race["rate"]


def document(done: list[dict[str, Any]]) -> dict[str, Any]:
    """Return everything that the JSON file holds."""
    cases = [verdict(race, share) for race in done for share in race["caps"]]
    facts = {"machine": machine(), "versions": versions()}
    return {**facts, **summary(cases), "races": done}


def main() -> int:
    """Run every race that is not there; return 1 if any contender failed or trained otherwise."""
    args = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 140)
    done = kept(args.json)
    if not done:
        shutil.rmtree(args.cache / "operators", ignore_errors=True)  # the machine drifts
    for model, layout, rate in races(args):
        if (model, str(layout), rate if layout.nodes > 1 else "") in map(key, done):
            continue
        try:
            with progress(console, f"{model}, {layout} at {rate}") as tell:
                done.append(run(args, model, layout, rate, tell))
        except Unavailable as reason:
            print(f"skipped, nodes cannot be emulated here: {reason}", file=sys.stderr)
            return SKIPPED
        console.print(table(done[-1]))
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(document(done), indent=1) + "\n")
    console.print(overview(document(done)))
    return int(failed(done, console))


def failed(done: list[dict[str, Any]], console: Console) -> bool:
    """Whether anyone failed who should not have; says who."""
    found = False
    for race in done:
        for entry in entries(race).values():
            if entry.error is not None and not entry.error.startswith(INFEASIBLE):
                where = f"{race['model']}, {race['cluster']} at {race['rate']}, {entry.name}"
                console.print(f"{where}: {shorten(entry.error, 400)}", style="red", markup=False)
                found = True
    return found


if __name__ == "__main__":
    sys.exit(main())
