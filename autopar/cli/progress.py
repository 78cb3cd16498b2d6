"""`progress_bar`: a bar or lines on stderr while the planner works."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autopar.cli.plain_console import PlainConsole
from autopar.planner.search.search_progress import ReportProgress, SearchProgress

AFTER_S = 0.5  # seconds before the first line or the bar
EVERY_S = 2.0  # seconds between lines without a terminal

FIRST = SearchProgress("the model", 0, 0, 0.0)


@contextmanager
def progress_bar(
    console: Console | None = None, after_s: float = AFTER_S, every_s: float = EVERY_S
) -> Iterator[ReportProgress]:
    """A callback for each step of planning; shows the latest on stderr from time to time."""
    console = console or PlainConsole(stderr=True)
    if not console.is_terminal:
        lines = _Lines(console, after_s, every_s)
        try:
            yield lines.report
        finally:
            lines.end()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task, begin = bar.add_task(str(FIRST), total=None), time.monotonic()
    timer = threading.Timer(after_s, bar.start)
    timer.daemon = True
    timer.start()

    def show(search: SearchProgress) -> None:
        bar.update(task, total=search.total, completed=search.done, description=str(search))
        if time.monotonic() - begin >= after_s:
            bar.start()

    try:
        yield show
    finally:
        timer.cancel()
        bar.stop()


class _Lines:
    """Prints the latest progress from a thread, `every_s` seconds apart, also where it stays."""

    def __init__(self, console: Console, after_s: float, every_s: float) -> None:
        self.console, self.every_s = console, every_s
        self.begin_s, self.latest = time.monotonic(), FIRST
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(after_s,), daemon=True)
        self.thread.start()

    def report(self, search: SearchProgress) -> None:
        self.latest = search

    def end(self) -> None:
        self.ended.set()
        self.thread.join()

    def _run(self, wait_s: float) -> None:
        while not self.ended.wait(wait_s):
            self._print()
            wait_s = self.every_s

    def _print(self) -> None:
        count = f" ({self.latest.done + 1} of {self.latest.total})" if self.latest.total else ""
        passed_s = time.monotonic() - self.begin_s
        self.console.print(f"{passed_s:.0f} s: {self.latest}{count}")
