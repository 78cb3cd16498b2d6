"""Text for people: escaped names, byte counts and times."""

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


def duration(seconds: float) -> str:
    """A time to three digits, such as "2.46 s" or "90.0 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(scaled := seconds * factor) >= 0.9995:
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f} {unit}"
    return f"{seconds * 1e9:.0f} ns" if seconds else "0 s"


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
