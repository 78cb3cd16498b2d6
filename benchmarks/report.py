"""From the outcome of a race to rows, a table and a JSON file."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.contenders import PLAIN, Contender

TOLERANCE = 1e-3  # largest relative difference of losses that passes for the same training


@dataclass(frozen=True)
class Row:
    """One contender's result for one model at one world size.

    Attributes:
        median_step_s: median over the rounds of the slowest rank's step, in seconds.
        quartiles_s: first and third quartile of the same, in seconds.
        peer: what `ratio` and `peak_ratio` refer to.
        ratio: median over the rounds of this step time by the peer's of the same round.
        ratio_quartiles: first and third quartile of the same.
        ratio_of_medians: this median by the peer's.
        fastest_peer: of those that are not autopar, the one with the least median.
        fastest_ratio: as `ratio`, with that one.
        peak_bytes: tensor bytes of a rank at the peak of a step (benchmarks/counting.py).
        peak_ratio: this peak by the peer's.
        loss_difference: worst relative difference of losses over the whole run.
        loss_reference: whose losses these are compared with.
        batch_statistics: which rows BatchNorm normalises over, where that makes a difference.
        error: why there are no figures, or why they do not count.
    """

    model: str
    world_size: int
    contender: str
    median_step_s: float | None = None
    quartiles_s: tuple[float, float] | None = None
    peer: str | None = None
    ratio: float | None = None
    ratio_quartiles: tuple[float, float] | None = None
    ratio_of_medians: float | None = None
    fastest_peer: str | None = None
    fastest_ratio: float | None = None
    peak_bytes: int | None = None
    peak_ratio: float | None = None
    loss_difference: float | None = None
    loss_reference: str | None = None
    batch_statistics: str | None = None
    error: str | None = None


def rows(
    model: str, world_size: int, field: Sequence[Contender], outcome: Mapping[str, Any]
) -> list[Row]:
    """Return a row for each contender, in the order of the field."""
    results = {result["contender"]: result for result in outcome["contenders"]}
    ran = {name: result for name, result in results.items() if result["error"] is None}
    losses = {name: result["losses"] for name, result in ran.items()}
    losses[PLAIN] = outcome["reference"]
    others = [c.name for c in field if c.module != "autopar" and c.name in ran]
    fastest = min(others, key=lambda name: median(ran[name]["seconds"]), default=None)
    made = []
    for contender in field:
        row: dict[str, Any] = {"model": model, "world_size": world_size}
        row["contender"] = contender.name
        row["batch_statistics"] = contender.statistics
        if contender.name in ran:
            row |= _speed(contender, ran, fastest) | _exactness(contender, losses)
        else:
            row["error"] = results[contender.name]["error"]
        made.append(Row(**row))
    return made


def _speed(contender: Contender, ran: Mapping[str, Any], fastest: str | None) -> dict[str, Any]:
    mine = ran[contender.name]
    seconds, peak = mine["seconds"], mine["peak_bytes"]
    figures = {
        "median_step_s": median(seconds),
        "quartiles_s": quartiles(seconds),
        "peak_bytes": peak,
    }
    if fastest:
        figures |= {
            "fastest_peer": fastest,
            "fastest_ratio": median(_ratios(seconds, ran[fastest]["seconds"])),
        }
    peer = next((name for name in contender.peers if name in ran), None)
    if peer:
        theirs = ran[peer]["seconds"]
        ratios = _ratios(seconds, theirs)
        figures |= {
            "peer": peer,
            "ratio": median(ratios),
            "ratio_quartiles": quartiles(ratios),
            "ratio_of_medians": median(seconds) / median(theirs),
            "peak_ratio": peak / ran[peer]["peak_bytes"],
        }
    return figures


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def _exactness(contender: Contender, losses: Mapping[str, list[float]]) -> dict[str, Any]:
    """Compare the losses with those that are right for the rows BatchNorm normalises over."""
    reference = contender.reference
    if reference not in losses:
        return {}
    pairs = zip(losses[contender.name], losses[reference], strict=True)
    worst = max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in pairs)
    error = f"losses differ by {worst:.1e} from those of {reference}" if worst > TOLERANCE else None
    return {"loss_difference": worst, "loss_reference": reference, "error": error}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def table(title: str, made: Sequence[Row]) -> Table:
    """Return the rows of one model at one world size as a table; quartiles in brackets."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("contender", no_wrap=True)
    for heading in ("step, ms", "time / peer's", "/ fastest's", "peak, MiB", "/ peer's"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    drawn.add_column("peer", no_wrap=True)
    drawn.add_column("losses differ by", no_wrap=True)
    for row in made:
        drawn.add_row(*_cells(row), style="red" if row.error else "")
    return drawn


def _cells(row: Row) -> list[str]:
    step = _with_quartiles(row.median_step_s, row.quartiles_s, 1e3, ".0f")
    ratio = _with_quartiles(row.ratio, row.ratio_quartiles, 1, ".2f")
    fastest = "" if row.fastest_ratio is None else f"{row.fastest_ratio:.2f}"
    peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.1f}"
    peak_ratio = "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}"
    exactness = "" if row.loss_difference is None else f"{row.loss_difference:.0e}"
    if row.error:
        exactness += " TOO MUCH" if exactness else "no figures, see below"
    return [row.contender, step, ratio, fastest, peak, peak_ratio, row.peer or "", exactness]


def _with_quartiles(
    value: float | None, quartiles: tuple[float, float] | None, unit: float, form: str
) -> str:
    if value is None or quartiles is None:
        return ""
    middle, low, high = (format(unit * number, form) for number in (value, *quartiles))
    return f"{middle} ({low} to {high})"


def document(made: Sequence[Row]) -> dict[str, Any]:
    """Return everything that the JSON file holds."""
    return {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [asdict(row) for row in made],
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on and what can be read without privileges."""
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
    """Return the versions of what ran, and the commit of this checkout."""
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
