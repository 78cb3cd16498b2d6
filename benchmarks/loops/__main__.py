"""Random training loops around a compiled model beside the same loops around the plain one.

    python -m benchmarks.loops --seed 3 --loops 600 --json results.json
    python -m benchmarks.loops --seed 3 --numbers 17,40
    python -m benchmarks.loops --seed 3 --single zero3

Each loop trains for three or four steps in float64, or in float32 under autocast to bfloat16.
Outcomes are "exact" (1e-8; in bfloat16 0.02, or thrice the rounding of the plain loop if it is
more), "told" (an error of autopar on all ranks, or a warning that numbers differ), "silent", "raw"
(any other error) and "hung". The exit status is 1 if a loop is silent, raw or hung.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.loops.case import OUTCOMES, Case, counts, run_case
from benchmarks.loops.draw import SETUPS, recipe
from benchmarks.loops.elements import ELEMENTS
from benchmarks.loops.loop import Recipe
from benchmarks.report import about, outcome_table, save, wide_console

FAILURES = ("silent", "raw", "hung")


def recipes(options: argparse.Namespace) -> Iterator[tuple[int, Recipe]]:
    """The loops of a seed, or one for each element."""
    if options.single:
        for number, (name, element) in enumerate(ELEMENTS.items()):
            form, ranks = (element.forms or ("loss",))[0], SETUPS[options.single][1][0]
            drawn = recipe(options.seed, number)
            if not (element.is_global and options.single.endswith("local")):
                yield (
                    number,
                    replace(
                        drawn,
                        net="attention" if options.single.startswith("cp2") else "perceptron",
                        form=form,
                        loss="mean",
                        elements=(name,),
                        traits=element.traits,
                        rows=(6, 6, 6),
                        setup=options.single,
                        ranks=ranks,
                    ),
                )
        return
    for number in options.numbers or range(options.loops):
        drawn = recipe(options.seed, number)
        if not options.setups or drawn.setup in options.setups:
            yield number, drawn


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains the chosen loops, and saves after each."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    console, start = wide_console(), time.monotonic()
    cases: list[Case] = []
    for number, drawn in recipes(options):
        cases.append(case := run_case(number, drawn))
        if options.verbose or case.outcome != "exact":
            console.print(line(case), markup=False, soft_wrap=True)
        if options.json:
            seconds = round(time.monotonic() - start, 1)
            facts = {"seed": options.seed, "seconds": seconds, "counts": counts(cases)}
            others = [replace(c, message=c.message[:200]) for c in cases if c.outcome != "exact"]
            save(options.json, {**about(), **facts, "cases": [asdict(c) for c in others]})
    console.print(table(cases))
    console.print(by_element(cases))
    return int(any(case.outcome in FAILURES for case in cases))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loops", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="write counts and all but exact cases here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loops", type=int, default=600, help="number of loops")
    parser.add_argument("--numbers", type=_listed(int), help="only these loops: 3,17")
    parser.add_argument("--setups", type=_listed(str), help=f"of {', '.join(SETUPS)}")
    parser.add_argument("--single", choices=SETUPS, help="a loop for each element, under this")
    parser.add_argument("--verbose", action="store_true", help="print exact cases too")
    return parser.parse_args(arguments)


def _listed(kind: type) -> Callable[[str], list[object]]:
    return lambda text: [kind(part) for part in text.split(",")]


def line(case: Case) -> str:
    """One case as text, with the first line of its message."""
    worst = "" if case.deviation is None else f" {case.deviation:.0e} in {case.place}"
    message = f"\n      {case.message.splitlines()[0][:300]}" if case.message else ""
    setup = f"{case.recipe['setup']} on {case.recipe['ranks']}"
    return f"{case.outcome:6} #{case.number} {setup}: {case.name}{worst} {case.seconds} s{message}"


def table(cases: Sequence[Case]) -> Table:
    """Outcomes by setup."""
    return outcome_table("setup", counts(cases))


def by_element(cases: Sequence[Case]) -> Table:
    """Outcomes by element, of elements that are not always exact."""
    outcomes: dict[str, Counter[str]] = {}
    for case in cases:
        for name in case.recipe["elements"]:
            outcomes.setdefault(name, Counter())[case.outcome] += 1
    drawn = Table("element", *OUTCOMES)
    for name, row in sorted(outcomes.items()):
        if set(row) != {"exact"}:
            drawn.add_row(name, *(str(row[outcome]) for outcome in OUTCOMES))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
