"""`PlainConsole`: rich's console, for text that holds names from models and files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from autopar.formatting import printable


class PlainConsole(Console):
    """A console that escapes control characters in what it is given; its own styles remain.

    Names may look like rich's markup, so that is text unless `markup` says otherwise.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of a renderable, their text printable."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)
