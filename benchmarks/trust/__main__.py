"""Files that are broken on purpose, and runs that are killed while they save.

    python -m benchmarks.trust --seed 3
    python -m benchmarks.trust --files 0 --histories 20

Breaks a file of each kind that autopar reads, at random, and reads it. It may be read, or be told
by an error of autopar. Failures are code that runs, any other error, no end within 5 s, lost data.
Histories of saves, kills, broken files and restarts must keep a run's newest whole checkpoint.
The exit status is 1 after a failure.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import about, save, wide_console
from benchmarks.trust.histories import run_history
from benchmarks.trust.reading import BAD, OUTCOMES, Case, read_broken


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    console, start = wide_console(), time.monotonic()
    console.print(f"seed {options.seed}")
    cases = broken_files(options.seed, options.files, console)
    faults = histories(options.seed, options.histories, console)
    seconds = round(time.monotonic() - start, 1)
    console.print(table(cases))
    console.print(f"{options.histories} histories, {len(faults)} with a fault; {seconds} s")
    bad = [case for case in cases if case.outcome in BAD]
    if options.json:
        counts = Counter(case.outcome for case in cases)
        facts = {
            "seed": options.seed,
            "seconds": seconds,
            "files": options.files,
            "outcomes": {outcome: counts[outcome] for outcome in OUTCOMES},
            "by_kind": {kind: dict(row) for kind, row in by_kind(cases).items()},
            "histories": options.histories,
            "faults": {str(number): found for number, found in faults.items()},
        }
        save(options.json, {**about(), **facts, "failures": [asdict(case) for case in bad]})
    return int(bool(bad or faults))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trust", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="write counts and failures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", type=int, default=300, help="number of broken files")
    parser.add_argument("--histories", type=int, default=200, help="number of histories")
    return parser.parse_args(arguments)


def broken_files(seed: int, count: int, console: Console) -> list[Case]:
    """Read broken files; print each failure."""
    found = []
    with tempfile.TemporaryDirectory(prefix="autopar-trust-") as top:
        Path(top).chmod(0o755)  # read without rights of one's own
        for number in range(count):
            folder = Path(top, str(number))
            folder.mkdir()
            found.append(case := read_broken(seed, number, folder))
            if case.outcome in BAD:
                console.print(str(case), markup=False, soft_wrap=True)
    return found


def histories(seed: int, count: int, console: Console) -> dict[int, list[str]]:
    """Run histories; return the faults of those that have any, and print them."""
    found = {}
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="autopar-trust-") as folder:
            if faults := run_history(f"{seed} {number}", Path(folder)):
                found[number] = faults
                console.print(f"history {number}: {'; '.join(faults)}", markup=False)
    return found


def by_kind(cases: Sequence[Case]) -> dict[str, Counter[str]]:
    kinds = sorted({case.kind for case in cases})
    return {kind: Counter(c.outcome for c in cases if c.kind == kind) for kind in kinds}


def table(cases: Sequence[Case]) -> Table:
    drawn = Table("file", *OUTCOMES)
    for kind, row in by_kind(cases).items():
        drawn.add_row(kind, *(str(row[outcome]) for outcome in OUTCOMES))
    return drawn


if __name__ == "__main__":
    sys.exit(main())
