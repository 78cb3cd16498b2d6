"""Tables for an out-of-memory error: memory by category, and changes that make a plan fit."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from autopar.errors import OutOfMemoryError
from autopar.formatting import human_bytes


def tables(error: OutOfMemoryError) -> Iterator[Table]:
    """Memory of the smallest plan by category, and the changes with which a plan fits."""
    total = sum(error.memory.values())
    needs = Table(title="Peak memory of the smallest plan", title_justify="left")
    needs.add_column("")
    needs.add_column("bytes", justify="right")
    for name, size in sorted(error.memory.items(), key=lambda part: -part[1]):
        if size:
            needs.add_row(name, f"{human_bytes(size)} ({size / total:.0%})")
    needs.add_row("missing", f"{human_bytes(error.shortfall)} ({error.shortfall})")
    yield needs
    helps = Table(title="Changes that would help, each planned again", title_justify="left")
    helps.add_column("change")
    helps.add_column("give")
    for name in ("a step takes", "a rank needs"):
        helps.add_column(name, justify="right")
    for change in error.changes:
        step = f"{change.step_s * 1e3:.1f} ms"
        helps.add_row(change.what, change.how, step, human_bytes(change.needed_bytes))
    yield helps
