"""Regret: the step of the chosen plan over the step of the best plan of an enumeration.

    python -m benchmarks.regret --cases deep --clusters 2x1 --rates 1gbit --steps 5

On an emulated cluster, plans of an enumeration, peers, and the plan chosen under each cap train the
same model in turn, step by step, in the same processes. Races in the file of `--json` are not run
again. With `--near` the enumeration leaves out what was slow in kept results. The exit status is 77
where nodes cannot be emulated.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console

from autopar.cost_model.disk_cache import cache_directory
from benchmarks.cluster import Network, Unavailable
from benchmarks.cluster.__main__ import SKIPPED
from benchmarks.cluster.network import bits_per_second
from benchmarks.cluster.ranks import start
from benchmarks.launch import Job, race
from benchmarks.peers import words
from benchmarks.regret.plans import PEERS, REPLICATED, Layout, chosen_name
from benchmarks.regret.score import entries, overview, race_table, summary, verdict
from benchmarks.regret.worker import Caps, RegretJob, names
from benchmarks.report import about, save, versions, wide_console

CLUSTER = r"[1-9]\d*x[1-9]\d*(@.+)?"
WORKER = "benchmarks.regret.worker"

NEAR = 1.25
"""Times the fastest plan of an earlier race: slower ones did not become the best since."""

INFEASIBLE = ("OutOfMemoryError", "StrategyError", "BatchError", "CaptureError")
"""Errors of strategies that do not suit a model."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regret",
        description="Measure every plan of an enumeration, peers, and the chosen plan.",
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
    parser.add_argument(
        "--caps", type=words, default=["none", "0.7"], help="shares of DDP's memory"
    )
    parser.add_argument("--contenders", type=words, default=[], metavar="NAMES", help="only these")
    parser.add_argument(
        "--near", type=Path, metavar="FILE", help="kept results: only what was near"
    )
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each contender")
    parser.add_argument("--json", type=Path, metavar="FILE", help="results, continued if present")
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
    """Yield model, layout and rate of each race; a single node runs once."""
    for text in args.clusters:
        cluster, _, rate = text.partition("@")
        layout, rates = Layout.of(cluster), [rate] if rate else args.rates
        for rate in rates if layout.nodes > 1 else rates[:1]:
            for model in args.cases:
                yield model, layout, rate


def run(
    args: argparse.Namespace, model: str, layout: Layout, rate: str, console: Console
) -> dict[str, Any]:
    case = importlib.import_module(args.models).CASES[model]
    everyone = names(case, layout, args.caps)
    allowed = args.contenders or (near(args.near, model, layout, args.caps) if args.near else ())
    job = RegretJob(
        case=model,
        world_size=layout.ranks,
        contenders=tuple(n for n in everyone if n in (allowed or everyone)),
        rounds=args.steps,
        threads=1,
        patience=args.patience,
        module=args.models,
        layout=str(layout),
        caps=args.caps,
    )
    title, begun = f"{model}, {layout} at {rate}", time.monotonic()
    with Network(layout.nodes, rate) as network, console.status(title) as status:

        def notify(text: str) -> None:
            status.update(f"{title}: {text}")
            if not console.is_terminal:
                print(f"{time.monotonic() - begun:5.0f} s {title}: {text}", file=sys.stderr)

        def start_rank(job: Job, rank: int, folder: Path, port: int) -> subprocess.Popen[bytes]:
            variables = {
                "AUTOPAR_CACHE": str(args.cache),
                "OMP_NUM_THREADS": str(job.threads),
                "MASTER_PORT": str(port),
                "PYTHONFAULTHANDLER": "1",
            }
            command, log = [sys.executable, "-m", WORKER, str(folder)], folder / f"log.{rank}"
            return start(
                network, command, rank, layout.ranks_per_node, environment=variables, log=log
            )

        outcome = race(job, notify, start_rank)
    return {
        "model": model,
        "cluster": str(layout),
        "rate": rate if layout.nodes > 1 else "",
        "caps": args.caps,
        "took_s": time.monotonic() - begun,
        "commit": versions()["commit"],
        **outcome,
    }


def near(results: Path, model: str, layout: Layout, caps: Caps) -> set[str]:
    """Contenders that earlier races left a chance to be the best under a cap, at any rate.

    They took at most `NEAR` times the fastest that fits. Peers, the plan that caps refer to, and
    chosen plans run in any case. There are none where nothing was raced before.
    """
    names: set[str] = set()
    for earlier in json.loads(results.read_text())["races"]:
        if (earlier["model"], earlier["cluster"]) != (model, str(layout)):
            continue
        ran = {name: row for name, row in earlier["contenders"].items() if "step_ms" in row}
        for cap in caps:
            most = math.inf if cap is None else cap * ran[REPLICATED]["peak_bytes"]
            steps = {n: row["step_ms"] for n, row in ran.items() if row["peak_bytes"] <= most}
            limit = NEAR * min(steps.values(), default=0.0)
            names |= {name for name, step in steps.items() if step <= limit}
    always = {*(peer.name for peer in PEERS), REPLICATED, *map(chosen_name, caps)}
    return names | always if names else names


def document(done: list[dict[str, Any]]) -> dict[str, Any]:
    cases = [verdict(race, share) for race in done for share in race["caps"]]
    return {**about(), **summary(cases), "races": done}


def main() -> int:
    """Run every missing race; return 1 if any contender failed or its losses differ."""
    args = parse_arguments()
    console = wide_console()
    done: list[dict[str, Any]] = []
    if args.json and args.json.exists():
        done = json.loads(args.json.read_text())["races"]
    if not done:
        shutil.rmtree(args.cache / "operators", ignore_errors=True)  # times of the machine drift
    for model, layout, rate in races(args):
        key = (model, str(layout), rate if layout.nodes > 1 else "")
        if key in [(each["model"], each["cluster"], each["rate"]) for each in done]:
            continue
        try:
            done.append(run(args, model, layout, rate, console))
        except Unavailable as reason:
            print(f"skipped, nodes cannot be emulated here: {reason}", file=sys.stderr)
            return SKIPPED
        console.print(race_table(done[-1]))
        if args.json:
            save(args.json, document(done))
    console.print(overview(document(done)))
    return int(failed(done, console))


def failed(done: list[dict[str, Any]], console: Console) -> bool:
    """Whether any feasible contender failed; prints its error."""
    found = False
    for each in done:
        for entry in entries(each).values():
            if entry.error is not None and not entry.error.startswith(INFEASIBLE):
                title = f"{each['model']}, {each['cluster']} at {each['rate']}, {entry.name}"
                console.print(f"{title}: {shorten(entry.error, 400)}", style="red", markup=False)
                found = True
    return found


if __name__ == "__main__":
    sys.exit(main())
