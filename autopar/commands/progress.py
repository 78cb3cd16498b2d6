"""Progress of a search: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.commands.plain_console import PlainConsole
from autopar.planner.search.mesh_search import ReportProgress, SearchProgress

AFTER_S = 2.0  # seconds before the bar appears
EVERY_S = 10.0  # seconds between lines without a terminal


@contextmanager
def progress_bar(
    console: Console | None = None, after_s: float = AFTER_S, every_s: float = EVERY_S
) -> Iterator[ReportProgress]:
    """A callback for each mesh; it updates a bar on stderr, or prints a line from time to time."""
    console = console or PlainConsole(stderr=True)
    if not console.is_terminal:
        yield _lines(console, every_s)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task, begin = bar.add_task("planning", total=None), time.monotonic()

    def show(search: SearchProgress) -> None:
        bar.update(task, total=search.total, completed=search.done, description=str(search))
        if time.monotonic() - begin >= after_s:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()


def _lines(console: Console, every_s: float) -> ReportProgress:
    """Prints a line for the current mesh, `every_s` seconds after the last one."""
    begin = time.monotonic()
    last_s = 0.0

    def report(search: SearchProgress) -> None:
        nonlocal last_s
        now_s = time.monotonic() - begin
        if now_s - last_s >= every_s:
            last_s = now_s
            console.print(f"{now_s:.0f} s: {search} ({search.done + 1} of {search.total})")

    return report
