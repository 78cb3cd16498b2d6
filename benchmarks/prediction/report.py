"""The results of the parts as tables and as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.report import machine, versions

PARTS = ("curves", "live", "steps", "memory")
TARGETS = {
    "curves": (0.035, 0.12),
    "curves, other groups": (0.10, None),
    "curves, gloo groups": (0.10, None),
    "live": (0.10, None),
    "steps": (0.10, 0.30),
    "memory": (0.03, None),
}
"""Largest median error and worst error that the project asks for."""


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst error of the cases, and the cases."""
    errors = [case["error"] for case in cases]
    return {
        "median_error": median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "cases": list(cases),
    }


def document(outcomes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that the JSON file holds."""
    return {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "parts": dict(outcomes),
    }


def overview(outcomes: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row for each part, with what it should reach."""
    drawn = _table("part", "cases", "median error", "at most", "worst", "at most")
    for name, outcome in _flat(outcomes):
        if "error" in outcome:
            drawn.add_row(name, "not run", style="red")
            continue
        middle, worst = outcome["median_error"], outcome["worst_error"]
        most, limit = TARGETS.get(name, (None, None))
        missed = _above(middle, most) or _above(worst, limit)
        cells = [str(len(outcome["cases"])), *map(_percent, (middle, most, worst, limit))]
        drawn.add_row(name, *cells, style="red" if missed else "green")
    return drawn


def details(name: str, outcome: Mapping[str, Any]) -> Iterator[Table]:
    """The cases of a part, those of one group (`group`, if they have one) in one row."""
    for title, part in _flat({name: outcome}):
        if "error" in part or not part["cases"]:
            continue
        drawn = _table(title, "cases", "median error", "mean", "worst")
        groups: dict[str, list[float]] = {}
        for case in part["cases"]:
            groups.setdefault(_group(case), []).append(case["error"])
        for group, errors in groups.items():
            mean = sum(errors) / len(errors)
            cells = map(_percent, (median(errors), mean, max(errors)))
            drawn.add_row(group, str(len(errors)), *cells)
        yield drawn
        for refusal in part.get("refused", ()):
            drawn.add_row(str(refusal), "refused", style="dim")


def _flat(outcomes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each part, then the parts inside it that have cases of their own."""
    for name, outcome in outcomes.items():
        yield name, outcome
        for inner, part in outcome.items():
            if isinstance(part, Mapping) and "cases" in part:
                yield f"{name}, {inner.replace('_', ' ')}", part


def _group(case: Mapping[str, Any]) -> str:
    """What a case is called: its `group`, or its words."""
    for name in ("group", "table"):
        if name in case:
            return str(case[name])
    words = (v for k, v in case.items() if k not in ("predicted", "measured", "error"))
    return " ".join(str(word) for word in words if isinstance(word, (str, int)))


def _table(first: str, *headings: str) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column(first, overflow="fold")
    for heading in headings:
        drawn.add_column(heading, justify="right", no_wrap=True)
    return drawn


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit
