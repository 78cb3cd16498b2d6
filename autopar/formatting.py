"""Text for terminals: escaped names and byte counts."""

from __future__ import annotations

import re
from collections.abc import Mapping

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, bidirectional marks, and lone surrogates."""


def printable(text: str) -> str:
    r"""Escapes control characters, so that none reaches the terminal.

    >>> printable("layer\x1b[31m") == r"layer\x1b[31m"
    True
    """
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)


def memory_text(memory: Mapping[str, int]) -> str:
    """Bytes by category, largest first."""
    parts = sorted(memory.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {human_bytes(size)}" for name, size in parts if size)


def milliseconds(seconds: float) -> str:
    """A time in milliseconds, with one decimal."""
    return f"{seconds * 1e3:.1f} ms"


def human_bytes(count: float) -> str:
    """A number of bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
