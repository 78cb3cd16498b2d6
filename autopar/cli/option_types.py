"""Types of command line options: each parses a text or names valid values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from autopar.core.common.checks import MAX_RANKS, count, nbytes, number, seconds, short_repr

T = TypeVar("T")


def size(text: str) -> int:
    """A size in bytes, such as "64MiB", "64MB", "64M" (64 MiB) or "4096"."""
    return _read(lambda: nbytes("", text, bare=True), text, "a size such as 64MiB")


def budget_s(text: str) -> float:
    """A positive number of seconds."""
    return _read(lambda: seconds("", float(text)), text, "a positive number of seconds")


def limit_s(text: str) -> float:
    """A number of seconds from 0."""
    return _read(lambda: seconds("", float(text), zero=True), text, "a number of seconds from 0")


def amount(text: str) -> float:
    """A positive number, such as a price."""
    return _read(lambda: number("", float(text), ""), text, "a positive number")


def _whole(least: int, most: int) -> Callable[[str], int]:
    what = f"a whole number from {least} to {most}"
    return lambda text: _read(lambda: count("", int(text), least, most), text, what)


rank, ranks = _whole(0, MAX_RANKS), _whole(1, MAX_RANKS)
processes, steps = _whole(1, 2**12), _whole(1, 2**20)
restarts, whole_seconds = _whole(0, 2**20), _whole(1, 2**20)


def nodes(text: str) -> tuple[int, int]:
    """A number of machines such as "4", or a range such as "1:4"."""
    least, _, most = text.partition(":")
    found = ranks(least), ranks(most or least)
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not a range such as 1:4")
    return found


def endpoint(text: str) -> str:
    """A host, or host:port, where the port is not 0."""
    what = "HOST:PORT with a port from 1 to 65535"
    parts = urlsplit(f"//{text}")
    port = _read(lambda: parts.port, text, what)  # a ValueError beyond 65535
    if not parts.hostname or port == 0 or parts.netloc != text:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not {what}")
    return text


def _read(read: Callable[[], T], text: str, what: str) -> T:
    try:
        return read()
    except ValueError:  # argument errors are ValueErrors, too
        raise argparse.ArgumentTypeError(f"{short_repr(text)} is not {what}") from None
