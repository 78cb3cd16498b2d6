"""Result files, tables of outcomes, and the tables of `benchmarks.peers`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.contenders import PLAIN, Contender

TOLERANCE = 1e-3  # largest relative difference of losses within the same training


def about() -> dict[str, Any]:
    """Return machine, versions and date, the head of every result file."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"machine": machine(), "versions": versions(), "date": date}


def save(path: Path, document: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def wide_console() -> Console:
    """Return a console that is wide enough for tables where there is no terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "backend": "gloo",
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "numpy", "deepspeed", "autopar"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    found["commit"] = git.stdout.strip() or None
    return found


@dataclass(frozen=True)
class Row:
    """One contender's result for one model at one world size; times are the slowest rank's."""

    model: str
    world_size: int
    contender: str
    median_step_s: float | None = None  # over the rounds
    quartiles_s: tuple[float, float] | None = None
    peer: str | None = None  # contender that `ratio` and `peak_ratio` refer to
    ratio: float | None = None  # median of step times over the peer's of the same round
    ratio_quartiles: tuple[float, float] | None = None
    fastest_peer: str | None = None  # least median of those that are not autopar
    fastest_ratio: float | None = None  # `ratio` with that contender
    peak_bytes: int | None = None  # tensor bytes of a rank at the peak of a step (`memory.py`)
    peak_ratio: float | None = None  # this peak over the peer's
    loss_difference: float | None = None  # worst relative difference over the whole run
    loss_reference: str | None = None  # contender that losses are compared with
    batch_statistics: str | None = None  # rows that BatchNorm normalises over, where it matters
    error: str | None = None  # reason why there are no valid figures


def rows(
    model: str, world_size: int, field: Sequence[Contender], outcome: Mapping[str, Any]
) -> list[Row]:
    """Return a row for each contender, in the order of the field."""
    results = {result["contender"]: result for result in outcome["contenders"]}
    ran = {name: result for name, result in results.items() if result["error"] is None}
    losses = {PLAIN: outcome["reference"]} | {name: ran[name]["losses"] for name in ran}
    others = [c.name for c in field if c.module != "autopar" and c.name in ran]
    fastest = min(others, key=lambda name: median(ran[name]["seconds"]), default=None)
    made = []
    for contender in field:
        figures: dict[str, Any] = {"batch_statistics": contender.statistics}
        if contender.name in ran:
            figures |= _speed(contender, ran, fastest) | _loss_figures(contender, losses)
        else:
            figures["error"] = results[contender.name]["error"]
        made.append(Row(model, world_size, contender.name, **figures))
    return made


def _speed(contender: Contender, ran: Mapping[str, Any], fastest: str | None) -> dict[str, Any]:
    seconds, peak = ran[contender.name]["seconds"], ran[contender.name]["peak_bytes"]
    figures = {
        "median_step_s": median(seconds),
        "quartiles_s": quartiles(seconds),
        "peak_bytes": peak,
    }
    if fastest:
        figures["fastest_peer"] = fastest
        figures["fastest_ratio"] = median(ratios(seconds, ran[fastest]["seconds"]))
    if peer := next((name for name in contender.peers if name in ran), None):
        over_peer = ratios(seconds, ran[peer]["seconds"])
        figures |= {
            "peer": peer,
            "ratio": median(over_peer),
            "ratio_quartiles": quartiles(over_peer),
            "peak_ratio": peak / ran[peer]["peak_bytes"],
        }
    return figures


def _loss_figures(contender: Contender, losses: Mapping[str, list[float]]) -> dict[str, Any]:
    """Compare losses with those that are right for the rows BatchNorm normalises over."""
    reference = contender.reference
    if reference not in losses:
        return {}
    worst = loss_difference(losses[contender.name], losses[reference])
    error = f"losses differ by {worst:.1e} from those of {reference}" if worst > TOLERANCE else None
    return {"loss_difference": worst, "loss_reference": reference, "error": error}


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the worst relative difference of losses; a race may end before its reference."""
    pairs = list(zip(losses, reference, strict=False))
    return max((abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs), default=1.0)


def ratios(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def empty_table(title: str, first: str, headings: Sequence[str]) -> Table:
    """Return a table whose first column is text and the others are figures."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column(first, overflow="fold")
    for heading in headings:
        drawn.add_column(heading, justify="right", no_wrap=True)
    return drawn


def outcome_counts(
    pairs: Iterable[tuple[str, str]], outcomes: Sequence[str]
) -> dict[str, dict[str, int]]:
    """The number of cases of each outcome, by row, of pairs of a row and an outcome."""
    counts: dict[str, Counter[str]] = {}
    for row, outcome in pairs:
        counts.setdefault(row, Counter())[outcome] += 1
    return {row: {name: counter[name] for name in outcomes} for row, counter in counts.items()}


def outcome_table(first: str, counts: Mapping[str, Mapping[str, int]]) -> Table:
    """A table of `outcome_counts`, with the share of exact cases."""
    drawn = Table(first, *next(iter(counts.values()), {}), "exact %")
    for row, numbers in counts.items():
        share = f"{100 * numbers['exact'] / (sum(numbers.values()) or 1):.1f}"
        drawn.add_row(row, *map(str, numbers.values()), share)
    return drawn


def number(value: float | None, unit: float, form: str) -> str:
    """Return a value as text, in units; empty for None."""
    return "" if value is None else format(unit * value, form)


def table(title: str, made: Sequence[Row]) -> Table:
    """Return the rows of one model at one world size as a table; quartiles in brackets."""
    headings = ("step, ms", "time / peer's", "/ fastest's", "peak, MiB", "/ peer's")
    drawn = empty_table(title, "contender", (*headings, "peer", "loss difference"))
    for row in made:
        exactness = number(row.loss_difference, 1, ".0e")
        if row.error:
            exactness += " TOO MUCH" if exactness else "no figures, see below"
        drawn.add_row(
            row.contender,
            _with_quartiles(row.median_step_s, row.quartiles_s, 1e3, ".0f"),
            _with_quartiles(row.ratio, row.ratio_quartiles, 1, ".2f"),
            number(row.fastest_ratio, 1, ".2f"),
            number(row.peak_bytes, 2**-20, ".1f"),
            number(row.peak_ratio, 1, ".2f"),
            row.peer or "",
            exactness,
            style="red" if row.error else "",
        )
    return drawn


def _with_quartiles(
    value: float | None, quartiles: tuple[float, float] | None, unit: float, form: str
) -> str:
    if value is None or quartiles is None:
        return ""
    middle, low, high = (format(unit * each, form) for each in (value, *quartiles))
    return f"{middle} ({low} to {high})"
