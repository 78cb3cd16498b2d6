"""A bar on the terminal while a search takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.planner.meshes import Looked, Progressed

AFTER_S = 2.0
"""Seconds before there is a bar."""


@contextmanager
def progress_bar(console: Console | None = None, after_s: float = AFTER_S) -> Iterator[Progressed]:
    """What to tell of each mesh; it is shown where somebody would see it.

    Args:
        console: where to; stderr by default.
        after_s: seconds before it shows.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda looked: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task, begin = bar.add_task("planning", total=None), time.monotonic()

    def show(looked: Looked) -> None:
        best = f", best {looked.best_s * 1e3:.1f} ms" if looked.best_s else ""
        bar.update(
            task,
            total=looked.total,
            completed=looked.done,
            description=f"planning {looked.mesh}{best}",
        )
        if time.monotonic() - begin >= after_s:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()
