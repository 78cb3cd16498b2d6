"""`PlainConsole`: rich's console for untrusted text, such as names from models and files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from autopar.formatting import printable


class PlainConsole(Console):
    """A console that escapes control characters in text.

    Rich's markup is plain text unless `markup` is set, because names may contain brackets.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of a renderable, with printable text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


def plain_table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    """A table with a line below its headings only; `right` are headings of numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
