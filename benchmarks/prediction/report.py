"""Results of the parts as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

from rich.table import Table

from benchmarks.report import empty_table, number

PARTS = ("curves", "memory")
TARGETS = {
    "curves": (0.035, 0.12),
    "curves, other groups": (0.10, None),
    "memory": (0.03, None),
}
"""Largest allowed median error and worst error."""


def case(group: str, predicted: float, measured: float, **facts: Any) -> dict[str, Any]:
    """Return one prediction beside its measurement."""
    error = abs(predicted / measured - 1)
    return {"group": group, **facts, "predicted": predicted, "measured": measured, "error": error}


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    errors = [case["error"] for case in cases]
    return {
        "median_error": median(errors) if errors else None,
        "worst_error": max(errors, default=None),
        "cases": list(cases),
    }


def overview(outcomes: Mapping[str, Mapping[str, Any]]) -> Table:
    drawn = empty_table("", "part", ("cases", "median error", "target", "worst", "target"))
    for name, outcome in _flat(outcomes):
        if "error" in outcome:
            drawn.add_row(name, "not run", style="red")
            continue
        targets = TARGETS.get(name, (None, None))
        cells, missed = [], False
        for key, target in zip(("median_error", "worst_error"), targets, strict=True):
            value = outcome[key]
            missed |= value is not None and target is not None and value > target
            cells += [number(value, 1, ".1%"), number(target, 1, ".1%")]
        drawn.add_row(name, str(len(outcome["cases"])), *cells, style="red" if missed else "green")
    return drawn


def details(name: str, outcome: Mapping[str, Any]) -> Iterator[Table]:
    for title, part in _flat({name: outcome}):
        if "error" in part or not part["cases"]:
            continue
        drawn = empty_table("", title, ("cases", "median error", "mean", "worst"))
        groups: dict[str, list[float]] = {}
        for each in part["cases"]:
            groups.setdefault(each["group"], []).append(each["error"])
        for group, errors in groups.items():
            cells = (f"{value:.1%}" for value in (median(errors), mean(errors), max(errors)))
            drawn.add_row(group, str(len(errors)), *cells)
        for refusal in part.get("refused", ()):
            drawn.add_row(str(refusal), "refused", style="dim")
        yield drawn


def _flat(outcomes: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each part, then the nested parts that have cases."""
    for name, outcome in outcomes.items():
        yield name, outcome
        for inner, part in outcome.items():
            if isinstance(part, Mapping) and "cases" in part:
                yield f"{name}, {inner.replace('_', ' ')}", part
