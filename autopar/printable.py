"""`printable`: text from names and files, safe to print on a terminal."""

from __future__ import annotations

import re

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, marks that turn text around, and halves of characters."""


def printable(text: str) -> str:
    r"""The text with control characters escaped, so that none reaches the terminal.

    >>> printable("layer\x1b[31m") == r"layer\x1b[31m"
    True
    """
    return _UNSAFE.sub(lambda match: ascii(match[0])[1:-1], text)
