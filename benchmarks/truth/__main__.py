"""Whether random models train as on one device, or are told not to.

    python -m benchmarks.truth --json FILE
    python -m benchmarks.truth --seed 3 --models 60 --strategies ddp --ranks 2
    python -m benchmarks.truth --only Queue --strategies zero3
    python -m benchmarks.truth --again FILE --outcomes silent,crash
    python -m benchmarks.truth --alone --strategies ddp,zero3

Each model is trained for three steps in float64 under ddp and two more strategies, and compared
with one process: losses, parameters and buffers. Outcomes are "exact" (1e-9), "told" (a warning or
an error of autopar), "noted" (a note in the plan alone), "silent" and "crash". The exit status is 1
if a case is noted, silent or crashed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import machine, versions
from benchmarks.truth.draw import alone, recipe
from benchmarks.truth.model import Recipe
from benchmarks.truth.outcome import OUTCOMES, Case, counts
from benchmarks.truth.registry import BLOCKS
from benchmarks.truth.run import cases
from benchmarks.truth.strategies import SETUPS, setups_of

Asked = Iterator[tuple[int, Recipe, Sequence[tuple[str, int]]]]
"""Numbers, recipes and setups of the models asked for."""


def chosen(given: argparse.Namespace) -> Asked:
    """Models of the seed, or of one block each."""
    count = len(BLOCKS) if given.alone else given.models
    for number in given.numbers or range(count):
        drawn = alone(list(BLOCKS)[number]) if given.alone else recipe(given.seed, number)
        if given.only and given.only not in drawn.name:
            continue
        setups = setups_of(given.seed, number)
        if given.strategies:
            ranks = dict(setups)
            setups = [(name, ranks.get(name, 2)) for name in given.strategies]
        if given.ranks:
            setups = [(n, r if len(SETUPS[n].ranks) == 1 else given.ranks) for n, r in setups]
        yield number, drawn, setups


def again(given: argparse.Namespace) -> Asked:
    """Cases of a file, as they were drawn then, of the outcomes and strategies asked for."""
    for case in json.loads(given.again.read_text())["cases"]:
        recipe = Recipe.load(case["recipe"])
        asked = case["outcome"] in given.outcomes and (given.only or "") in recipe.name
        if asked and case["strategy"] in (given.strategies or SETUPS):
            yield case["number"], recipe, [(case["strategy"], case["ranks"])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sweep."""
    given = parsed(arguments)
    torch.set_num_threads(1)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(f"seed {given.seed}")
    begun, found = time.monotonic(), []
    for case in cases(again(given) if given.again else chosen(given)):
        found.append(case)
        if given.verbose or case.outcome != "exact":
            console.print(line(case), markup=False, soft_wrap=True)
        if given.json:
            save(given.json, given.seed, found, time.monotonic() - begun)
    console.print(table(found))
    return int(any(case.outcome in ("noted", "silent", "crash") for case in found))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.truth", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="write cases and counts to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=400, help="number of models")
    parser.add_argument("--numbers", type=listed(int), help="only these models: 3,17")
    parser.add_argument("--only", help="only models whose name contains this")
    parser.add_argument("--strategies", type=listed(str), help=f"of {', '.join(SETUPS)}")
    parser.add_argument("--ranks", type=int, help="instead of 2 or 3 at random")
    parser.add_argument("--alone", action="store_true", help="models of one block each, all blocks")
    parser.add_argument("--again", type=Path, help="run cases of this JSON file again")
    parser.add_argument(
        "--outcomes", type=listed(str), default=["noted", "silent", "crash"], help="with --again"
    )
    parser.add_argument("--verbose", action="store_true", help="print exact cases too")
    given = parser.parse_args(arguments)
    if unknown := set(given.strategies or ()) - set(SETUPS):
        parser.error(f"--strategies: {sorted(unknown)} is none of {', '.join(SETUPS)}")
    return given


def listed(kind: type) -> object:
    """A parser of comma-separated values."""
    return lambda text: [kind(part) for part in text.split(",")]


def line(case: Case) -> str:
    """One case as text, and the first line of what was said."""
    apart = "" if case.deviation is None else f" {case.deviation:.0e} in {case.of}"
    said = f"\n      {case.said[0].splitlines()[0][:300]}" if case.said else ""
    where = f"{case.strategy} on {case.ranks}, {case.recipe['rows']} rows"
    return f"{case.outcome:7} #{case.number} {case.name} | {where}{apart} {case.seconds} s{said}"


def table(found: Sequence[Case]) -> Table:
    """Outcomes by strategy, and how many cases torch's own DDP or fully_shard trained."""
    made = Table("strategy", *OUTCOMES, "exact %", "by torch")
    for name, row in counts(found).items():
        share = f"{100 * row['exact'] / sum(row.values()):.1f}"
        by_torch = sum(case.fell_back for case in found if name in (case.strategy, "all"))
        made.add_row(name, *(str(row[outcome]) for outcome in OUTCOMES), share, str(by_torch))
    return made


def save(path: Path, seed: int, found: Sequence[Case], seconds: float) -> None:
    """Write what is known so far."""
    document = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "seconds": round(seconds, 1),
        "counts": counts(found),
        "cases": [asdict(case) for case in found],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
