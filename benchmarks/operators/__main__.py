"""Every operator of torch's own tests as a layer, captured, beside eager.

    python -m benchmarks.operators --json results.json
    python -m benchmarks.operators --cells tp2,ddp --sample 60 --seed 3
    python -m benchmarks.operators --operators linalg.cholesky nn.functional.relu --verbose

A layer applies an operator to the arguments of one of torch's samples, in two calls. Outputs,
gradients of inputs and parameters, and inputs afterwards are compared, in float64 where there is a
choice. Draws are seeded alike. Outcomes are "exact" (the tolerance of the dtype), "told" (an error
of autopar on all ranks, or a warning that numbers differ), "silent", "raw" (any other error),
"crashed" and "hung". Samples do not count that eager refuses, whose results are memory without
values, or that draw on several ranks, since each draws its own. The exit status is 1 if a sample
is silent, raw, crashed or hung.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.operators.case import CELLS, FAILURES, Case, counts, facts, run_cases
from benchmarks.operators.layer import operators
from benchmarks.report import about, outcome_table, save, wide_console

TOGETHER = 8
"""Operators of one run of the workers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the chosen operators in the chosen cells, and saves after each run."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    console, start = wide_console(), time.monotonic()
    cases: list[Case] = []
    for cell, names in work(options):
        new = run_cases(names, cell, options.seed, options.samples)
        cases += new
        for case in new:
            if case.outcome and (options.verbose or case.outcome in FAILURES or case.logged):
                console.print(line(case), markup=False, soft_wrap=True)
        if options.json:
            seconds = round(time.monotonic() - start, 1)
            head = {"seed": options.seed, "samples": options.samples, "seconds": seconds}
            others = [facts(case) for case in cases if case.outcome not in ("", "exact")]
            save(options.json, {**about(), **head, "counts": counts(cases), "cases": others})
    console.print(table(cases))
    return int(any(case.outcome in FAILURES for case in cases))


def work(options: argparse.Namespace) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Cells with the operators of one run of the workers."""
    for cell in options.cells:
        names = list(options.operators or operators())
        if options.sample and options.sample < len(names):
            chosen = random.Random(f"{options.seed}/{cell}").sample(names, options.sample)
            names = sorted(chosen)
        for first in range(0, len(names), TOGETHER):
            yield cell, tuple(names[first : first + TOGETHER])


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operators", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="write counts and all but exact samples here")
    parser.add_argument("--seed", type=int, default=0, help="of values and the choice of samples")
    parser.add_argument("--samples", type=int, default=3, help="of an operator")
    parser.add_argument("--operators", nargs="+", metavar="NAME", help="only these, as torch.NAME")
    parser.add_argument("--sample", type=int, help="so many operators, drawn by the seed")
    parser.add_argument(
        "--cells", type=lambda text: text.split(","), default=["one"], help=f"of {', '.join(CELLS)}"
    )
    parser.add_argument("--verbose", action="store_true", help="print all samples")
    options = parser.parse_args(arguments)
    if unknown := set(options.cells) - set(CELLS):
        parser.error(f"--cells: {sorted(unknown)} is none of {', '.join(CELLS)}")
    if unknown := set(options.operators or ()) - set(operators()):
        parser.error(f"--operators: torch's tests have no {sorted(unknown)}")
    return options


def line(case: Case) -> str:
    """One case as text, with the first line of its message."""
    worst = "" if case.deviation is None else f" {case.deviation:.0e} tolerances in {case.place}"
    told = case.message or case.logged
    message = f"\n      {told.splitlines()[0][:300]}" if told else ""
    return f"{case.outcome:7} {case.cell} {case.operator} #{case.number}{worst}{message}"


def table(cases: Sequence[Case]) -> Table:
    """Outcomes by cell."""
    return outcome_table("cell", counts(cases))


if __name__ == "__main__":
    sys.exit(main())
