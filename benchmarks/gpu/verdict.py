"""`Verdict`: what a GPU's results mean, in sentences, worst first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A sentence about one part.

    Attributes:
        part: name of the part.
        right: whether nothing was wrong; None where the part did not run to its end.
        text: the sentence.
    """

    part: str
    right: bool | None
    text: str


def verdicts(document: Mapping[str, Any], parts: Mapping[str, Any]) -> list[Verdict]:
    """Return a verdict for every part, those that went wrong first."""
    results = document["parts"]
    judged = [judge(name, results.get(name)) for name in parts]
    return sorted(judged, key=lambda verdict: {False: 0, None: 1, True: 2}[verdict.right])


def judge(name: str, result: Mapping[str, Any] | None) -> Verdict:
    if result is None:
        return Verdict(name, None, "did not run")
    wrong = [row for row in result["rows"] if not row["ok"]]
    if wrong:
        return Verdict(name, False, "; ".join(describe(row) for row in wrong))
    if result["ended"]:
        done = len(result["rows"])
        return Verdict(name, None, f"{done} cases right, then {result['ended'].splitlines()[0]}")
    return Verdict(name, True, summary(result["rows"]))


def describe(row: Row) -> str:
    """Say in words what is wrong with a row."""
    return ", ".join((f"{row['case']}: {row['remark'] or 'wrong'}", *_figures(row)))


def _figures(row: Row) -> Iterator[str]:
    if row.get("error") is not None:
        yield f"numbers differ by {row['error']:.1e}"
    if row.get("predicted_ms") is not None and row.get("ratio") is not None:
        faster = "fast" if row["ratio"] < 1 else "slow"
        off = max(row["ratio"], 1 / row["ratio"]) if row["ratio"] else 0.0
        yield f"predicted {off:.2f} times too {faster}"
    elif row.get("ratio") is not None:
        yield f"{row['ratio']:.2f} times as long"


def summary(rows: list[Row]) -> str:
    """Say in a sentence what the rows of a part without faults show."""
    words = [f"{len(rows)} cases right"]
    errors = [row["error"] for row in rows if row.get("error") is not None]
    if errors:
        words.append(f"losses within {max(errors):.1e}")
    ratios = [row["ratio"] for row in rows if row.get("predicted_ms") and row.get("ratio")]
    if ratios:
        low, high = min(ratios), max(ratios)
        words.append(f"predicted over measured {median(ratios):.2f} ({low:.2f} to {high:.2f})")
    return ", ".join(words)


def show(console: Console, document: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Print a line for each verdict."""
    gpu = (document["gpu"] or {}).get("name", "the CPU, a dry run")
    console.print(f"\n[bold]Verdict on {gpu}[/bold]")
    marks = {True: ("right", "green"), False: ("WRONG", "red"), None: ("open", "yellow")}
    for verdict in verdicts(document, parts):
        word, style = marks[verdict.right]
        console.print(f"{word:>6}  {verdict.part}: {verdict.text}", style=style, markup=False)
