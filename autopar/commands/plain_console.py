"""`PlainConsole`: rich's console for untrusted text, such as names from models and files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

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
