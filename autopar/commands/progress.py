"""How far a search is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.commands.plain_console import PlainConsole
from autopar.planner.search.mesh_search import ReportProgress, SearchProgress

AFTER_S = 2.0
"""Seconds before there is a bar."""

EVERY_S = 10.0
"""Seconds between lines where there is no terminal."""


@contextmanager
def progress_bar(
    console: Console | None = None, after_s: float = AFTER_S, every_s: float = EVERY_S
) -> Iterator[ReportProgress]:
    """What to tell of each mesh; it is shown in place, or as a line now and then.

    Args:
        console: where to; stderr by default.
        after_s: seconds before it shows on a terminal.
        every_s: seconds between lines elsewhere.
    """
    console = console or PlainConsole(stderr=True)
    if not console.is_terminal:
        yield _lines(console, every_s)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task, begin = bar.add_task("planning", total=None), time.monotonic()

    def show(looked: SearchProgress) -> None:
        bar.update(task, total=looked.total, completed=looked.done, description=str(looked))
        if time.monotonic() - begin >= after_s:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()


def _lines(console: Console, every_s: float) -> ReportProgress:
    """Writes a line for what is looked at when the last one was some seconds ago."""
    begin = time.monotonic()
    last_s = 0.0

    def tell(looked: SearchProgress) -> None:
        nonlocal last_s
        now_s = time.monotonic() - begin
        if now_s - last_s >= every_s:
            last_s = now_s
            console.print(f"{now_s:.0f} s: {looked} ({looked.done + 1} of {looked.total})")

    return tell
