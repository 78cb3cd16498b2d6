"""Architectures under four plans on two processes, in float64, beside one process.

    python -m benchmarks.architectures --only llama,mixtral --plans ddp,tp2 --json results.json

Rows of earlier runs in the file are kept, and replaced by newer ones; `--resume` measures only the
cases that have none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.architectures.measure import COLUMNS, PLANS, ROWS, STEPS, TOLERANCE, Row, measure
from benchmarks.architectures.table import ARCHITECTURES
from benchmarks.report import about, empty_table, wide_console

LIMIT_S = 180.0
OUTCOMES = ("exact", "told", "silent", "failed")


def main(arguments: list[str] | None = None) -> int:
    """Measures the chosen cases, and saves each as soon as it has ended."""
    options, console = parse_arguments(arguments), wide_console()
    rows = read(options.json) if options.json else {}
    for name in options.only:
        for plan in options.plans:
            if options.resume and (name, plan) in rows:
                continue
            row = measure(name, plan, options.limit)
            rows[name, plan] = row
            console.print(f"{name} {plan}: {row.outcome} {row.error} {row.why}", markup=False)
            if options.json:
                write(options.json, list(rows.values()))
    console.print(table(list(rows.values())))
    return int(any(row.outcome in ("silent", "failed") for row in rows.values()))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument("--only", type=_names(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--plans", type=_names(PLANS), default=list(COLUMNS))
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each case")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has")
    return parser.parse_args(arguments)


def _names(known: Any) -> Any:
    def read_names(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(known)):
            raise argparse.ArgumentTypeError(f"no {unknown}; choose from {', '.join(known)}")
        return names

    return read_names


def table(rows: Sequence[Row]) -> Table:
    """The number of architectures by plan and outcome."""
    drawn = empty_table(f"{STEPS} steps, {ROWS} rows, exact: {TOLERANCE:g}", "plan", OUTCOMES)
    for plan in PLANS:
        counts = Counter(row.outcome for row in rows if row.plan == plan)
        if counts:
            drawn.add_row(plan, *(str(counts[outcome]) for outcome in OUTCOMES))
    return drawn


def read(path: Path) -> dict[tuple[str, str], Row]:
    """The rows of a result file, by architecture and plan."""
    if not path.exists():
        return {}
    rows = (Row(**fields) for fields in json.loads(path.read_text())["rows"])
    return {(row.name, row.plan): row for row in rows}


def write(path: Path, rows: Sequence[Row]) -> None:
    """A result file with one line for each row."""
    head = json.dumps({**about(), "rows_of_a_batch": ROWS, "steps": STEPS, "tolerance": TOLERANCE})
    order = [*ARCHITECTURES]
    known = [row for row in rows if row.name in ARCHITECTURES]
    known.sort(key=lambda row: (order.index(row.name), [*PLANS].index(row.plan)))
    lines = ",\n".join(json.dumps(asdict(row)) for row in known)
    path.write_text(f'{head[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
