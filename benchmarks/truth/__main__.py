"""Distributed training of random models beside one process.

    python -m benchmarks.truth --seed 3 --models 60 --strategies ddp --ranks 2
    python -m benchmarks.truth --again FILE --outcomes silent,crash

Each model trains for three steps in float64 under ddp and two more strategies. Outcomes are "exact"
(1e-9), "reported" (a warning or an error of autopar), "noted" (a note in the plan alone), "silent"
and "crash". The exit status is 1 if a case is noted, silent or crashed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.report import about, save, wide_console
from benchmarks.truth.case import OUTCOMES, SETUPS, Case, counts, run_case, setups_of
from benchmarks.truth.draw import recipe, single_block
from benchmarks.truth.recipe import Recipe
from benchmarks.truth.registry import BLOCKS

Cases = Iterator[tuple[int, Recipe, str, int]]
"""Number and recipe of a model, name of a setup, and world size."""

FAILURES = ["noted", "silent", "crash"]


def drawn_cases(options: argparse.Namespace) -> Cases:
    """Yield the cases of the seed, or one model for each block."""
    count = len(BLOCKS) if options.single else options.models
    for number in options.numbers or range(count):
        if options.single:
            drawn = single_block(list(BLOCKS)[number])
        else:
            drawn = recipe(options.seed, number)
        if options.only and options.only not in drawn.name:
            continue
        setups = setups_of(options.seed, number)
        if options.strategies:
            setups = [(name, dict(setups).get(name, 2)) for name in options.strategies]
        for name, ranks in setups:
            free = options.ranks and len(SETUPS[name].ranks) > 1
            yield number, drawn, name, options.ranks if free else ranks


def loaded_cases(options: argparse.Namespace) -> Cases:
    """Yield the cases of a file with the chosen outcomes and strategies."""
    for case in json.loads(options.again.read_text())["cases"]:
        drawn = Recipe.load(case["recipe"])
        chosen = case["outcome"] in options.outcomes and (options.only or "") in drawn.name
        if chosen and case["strategy"] in (options.strategies or SETUPS):
            yield case["number"], drawn, case["strategy"], case["ranks"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    console = wide_console()
    console.print(f"seed {options.seed}")
    start, found = time.monotonic(), list[Case]()
    for number, drawn, setup, ranks in (loaded_cases if options.again else drawn_cases)(options):
        if not SETUPS[setup].suits(drawn):
            continue
        found.append(case := run_case(number, drawn, setup, ranks))
        if options.verbose or case.outcome != "exact":
            console.print(line(case), markup=False, soft_wrap=True)
        if options.json:
            seconds = round(time.monotonic() - start, 1)
            facts = {"seed": options.seed, "seconds": seconds, "counts": counts(found)}
            save(options.json, {**about(), **facts, "cases": [asdict(case) for case in found]})
    console.print(table(found))
    return int(any(case.outcome in FAILURES for case in found))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.truth", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="write cases and counts to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=400, help="number of models")
    parser.add_argument("--numbers", type=_listed(int), help="only these models: 3,17")
    parser.add_argument("--only", help="only models whose name contains this")
    parser.add_argument("--strategies", type=_listed(str), help=f"of {', '.join(SETUPS)}")
    parser.add_argument("--ranks", type=int, help="instead of 2 or 3 at random")
    parser.add_argument("--single", action="store_true", help="a model for each block")
    parser.add_argument("--again", type=Path, help="run cases of this JSON file again")
    parser.add_argument("--outcomes", type=_listed(str), default=FAILURES, help="with --again")
    parser.add_argument("--verbose", action="store_true", help="print exact cases too")
    options = parser.parse_args(arguments)
    if unknown := set(options.strategies or ()) - set(SETUPS):
        parser.error(f"--strategies: {sorted(unknown)} is none of {', '.join(SETUPS)}")
    return options


def _listed(kind: type) -> Callable[[str], list[object]]:
    return lambda text: [kind(part) for part in text.split(",")]


def line(case: Case) -> str:
    """Return one case as text, with the first line of its messages."""
    worst = "" if case.deviation is None else f" {case.deviation:.0e} in {case.tensor}"
    message = f"\n      {case.messages[0].splitlines()[0][:300]}" if case.messages else ""
    setup = f"{case.strategy} on {case.ranks}, {case.recipe['rows']} rows"
    name = f"{case.outcome:8} #{case.number} {case.name}"
    return f"{name} | {setup}{worst} {case.seconds} s{message}"


def table(found: Sequence[Case]) -> Table:
    drawn = Table("strategy", *OUTCOMES, "exact %", "by torch")
    for name, row in counts(found).items():
        share = f"{100 * row['exact'] / sum(row.values()):.1f}"
        by_torch = sum(case.fell_back for case in found if name in (case.strategy, "all"))
        drawn.add_row(name, *(str(row[outcome]) for outcome in OUTCOMES), share, str(by_torch))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
