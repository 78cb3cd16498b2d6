"""Records: fixed-size rows of numbers that ranks exchange and compare before they communicate.

A record holds the event, the payload's size in bytes, samples, and a (value, group) pair for each
entry. Texts travel as hashes; ranks exchange the texts themselves only for an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from autopar.core.common.row_exchange import RECORD_NUMBERS
from autopar.errors import AutoparError, DisagreementError

SAMPLE_NUMBERS = 16
"""Numbers of a record that ranks exchange without comparing them."""

HEADER_NUMBERS = 2 + SAMPLE_NUMBERS
"""Numbers before the entries: event, payload size and samples."""

MAX_ENTRIES = (RECORD_NUMBERS - HEADER_NUMBERS) // 2
"""Entries of a record."""

MAX_TEXT_CHARS = 400
"""Characters of a value in an error."""


class Entry(NamedTuple):
    """A value that must be equal on all ranks of a group.

    Attributes:
        name: verb and object for the error: "train other parameters".
        value: the value; ints are compared directly, others by their text. Of a mapping from names
            to texts, an error shows the first item that differs.
        group: ranks with equal groups are compared.
        shown: text for the error, by default the text of `value`.
    """

    name: str
    value: object
    group: object = ""
    advice: str = ""
    error: type[AutoparError] = DisagreementError
    shown: str | None = None

    @property
    def told(self) -> str | dict[str, str]:
        """The value as ranks exchange it for an error."""
        if isinstance(self.value, Mapping):
            return {name: _shortened(text) for name, text in self.value.items()}
        return _shortened(str(self.value) if self.shown is None else self.shown)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


def stable_hash(value: object) -> int:
    """A 63-bit hash of a text; ints are returned as they are."""
    return value if type(value) is int and abs(value) < 2**62 else _text_hash(str(value))


@lru_cache(maxsize=4096)
def _text_hash(text: str) -> int:
    # Python's `hash` of a text differs in every process. The shift makes it fit an int64.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def encode(
    event: str, entries: Sequence[Entry], payload_bytes: int, samples: Sequence[int]
) -> list[int]:
    """The record of a rank, which has the same length for every event.

    Raises:
        ValueError: there are more than `MAX_ENTRIES`.
    """
    # a longer record would leave numbers in the sockets, and every later exchange would hang
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"{len(entries)} entries in a record that has room for {MAX_ENTRIES}")
    names = ",".join(entry.name for entry in entries)
    numbers = [_text_hash(f"{event}|{names}"), payload_bytes, *samples]
    numbers += [0] * (HEADER_NUMBERS - len(numbers))
    for entry in entries:
        numbers += [stable_hash(entry.value), stable_hash(entry.group)]
    return numbers + [0] * (RECORD_NUMBERS - len(numbers))


def odd_ranks(pairs: Sequence[Sequence[object]]) -> dict[int, int]:
    """The first rank of the group of each rank that has another value, given (value, group)s."""
    first: dict[object, int] = {}
    bases = [first.setdefault(group, rank) for rank, (_, group) in enumerate(pairs)]
    return {rank: base for rank, base in enumerate(bases) if pairs[rank][0] != pairs[base][0]}


def differences(records: Sequence[Sequence[int]], count: int) -> dict[int, dict[int, int]]:
    """The `odd_ranks` of each of the first `count` entries that has any."""
    begins = [HEADER_NUMBERS + 2 * place for place in range(count)]
    odd = [odd_ranks([record[begin : begin + 2] for record in records]) for begin in begins]
    return {place: ranks for place, ranks in enumerate(odd) if ranks}


def describe_events(events: Sequence[str]) -> str:
    """The error for ranks that announced different events."""
    ranks: dict[str, list[int]] = {}
    for rank, event in enumerate(events):
        ranks.setdefault(event, []).append(rank)
    doing = "; ".join(f"rank(s) {same}: {event}" for event, same in ranks.items())
    return (
        f"the ranks do different things at the same time: {doing}. Every rank must call the model, "
        "run backward, clip and save in the same order and equally often."
    )


def describe_entry(
    event: str, entry: Entry, odd: Mapping[int, int], told: Sequence[str | dict[str, str]]
) -> str:
    """One line about the `odd_ranks` of an entry, given what each rank told of it."""
    rank, base = next(iter(odd.items()))
    here, there = told[rank], told[base]
    if isinstance(here, dict) and isinstance(there, dict):
        here, there = _first_difference(here, there)
    values = f": {here} on rank {rank}, {there} on rank {base}" if here != there else ""
    return (
        f"rank(s) {list(odd)} {entry.name} than rank {base}{values} (each {event}). {entry.advice}"
    )


def _first_difference(here: Mapping[str, str], there: Mapping[str, str]) -> tuple[str, str]:
    """The first item that differs, as text; equal mappings differ by order alone."""
    for name in [*there, *(name for name in here if name not in there)]:
        if here.get(name) != there.get(name):
            mine, other = (
                f"{name} is {texts[name]}" if name in texts else f"no {name}"
                for texts in (here, there)
            )
            return mine, other
    return ", ".join(here), ", ".join(there)
