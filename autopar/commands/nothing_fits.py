"""What the command line says where no plan fits: what is missing, of what, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from autopar.errors import OutOfMemoryError
from autopar.formatting import human_bytes


def tables(error: OutOfMemoryError) -> Iterator[Table]:
    """What the smallest plan needs, by category, and the changes with which one fits."""
    total = sum(error.memory.values())
    needs = Table(title="What the smallest plan holds at its peak", title_justify="left")
    needs.add_column("")
    needs.add_column("bytes", justify="right")
    for name, size in sorted(error.memory.items(), key=lambda part: -part[1]):
        if size:
            needs.add_row(name, f"{human_bytes(size)} ({size / total:.0%})")
    needs.add_row("more than there is", f"{human_bytes(error.shortfall)} ({error.shortfall})")
    yield needs
    helps = Table(title="What would help, each planned again", title_justify="left")
    helps.add_column("change")
    helps.add_column("give")
    for name in ("a step takes", "a rank needs"):
        helps.add_column(name, justify="right")
    for change in error.changes:
        step = f"{change.step_s * 1e3:.1f} ms"
        helps.add_row(change.what, change.how, step, human_bytes(change.needed_bytes))
    yield helps
