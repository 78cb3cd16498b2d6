"""Records: fixed-size rows of numbers that ranks exchange and compare before they communicate.

A record holds the event, the payload's size in bytes, samples, and a (value, group) pair for each
entry. Texts travel as hashes; ranks exchange the texts themselves only for an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.errors import AutoparError, DisagreementError

MAX_ENTRIES = 16
"""Entries of a record."""

SAMPLE_NUMBERS = 16
"""Numbers of a record that ranks exchange without comparing them."""

HEADER_NUMBERS = 2 + SAMPLE_NUMBERS
"""Numbers before the entries: event, payload size and samples."""

MAX_TEXT_CHARS = 400
"""Characters of a value in an error."""


@dataclass(frozen=True)
class Entry:
    """A value that must be equal on all ranks of a group.

    Attributes:
        name: verb and object for the error: "train other parameters".
        value: the value; ints are compared directly, others by their text.
        group: ranks with equal groups are compared.
        advice: one or two sentences for the error.
        error: class of the error.
        shown: text for the error, by default the text of `value`.
    """

    name: str
    value: object
    group: object = ""
    advice: str = ""
    error: type[AutoparError] = DisagreementError
    shown: str | None = None

    @property
    def text(self) -> str:
        """The value as the error shows it."""
        text = str(self.value) if self.shown is None else self.shown
        return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


def stable_hash(value: object) -> int:
    """A 63-bit hash of a text; ints are returned as they are."""
    return value if type(value) is int and abs(value) < 2**62 else _text_hash(str(value))


@lru_cache(maxsize=4096)
def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def encode(
    event: str, entries: Sequence[Entry], payload_bytes: int, samples: Sequence[int]
) -> list[int]:
    """The record of a rank, which has the same length for every event."""
    names = ",".join(entry.name for entry in entries)
    numbers = [_text_hash(f"{event}|{names}"), payload_bytes, *samples]
    numbers += [0] * (HEADER_NUMBERS - len(numbers))
    for entry in entries:
        numbers += [stable_hash(entry.value), stable_hash(entry.group)]
    return numbers + [0] * (HEADER_NUMBERS + 2 * MAX_ENTRIES - len(numbers))


def have_same_event(records: Sequence[Sequence[int]]) -> bool:
    """Whether all ranks announced the same event with the same entries."""
    return len({record[0] for record in records}) == 1


def differing_entries(records: Sequence[Sequence[int]], count: int) -> list[int]:
    """The entries among the first `count` that differ between ranks of a group."""
    return [place for place in range(count) if _differ(_pairs(records, place))]


def _pairs(records: Sequence[Sequence[int]], place: int) -> list[Sequence[int]]:
    """The (value, group) pair of an entry, by rank."""
    begin = HEADER_NUMBERS + 2 * place
    return [record[begin : begin + 2] for record in records]


def _differ(pairs: Sequence[Sequence[int]]) -> bool:
    first: dict[int, int] = {}
    return any(first.setdefault(group, value) != value for value, group in pairs)


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
    event: str,
    entry: Entry,
    place: int,
    texts: Sequence[str],
    records: Sequence[Sequence[int]],
) -> str:
    """One line about the ranks whose entry differs from the first rank of their group.

    Args:
        event: the event of all ranks.
        entry: the entry.
        place: position of the entry in the record.
        texts: texts of the entry, by rank.
        records: all records, by rank.
    """
    pairs = _pairs(records, place)
    first: dict[int, int] = {}
    odd = [
        rank
        for rank, (value, group) in enumerate(pairs)
        if pairs[first.setdefault(group, rank)][0] != value
    ]
    base = first[pairs[odd[0]][1]]
    return (
        f"rank(s) {odd} {entry.name} than rank {base}: {texts[odd[0]]} on rank {odd[0]}, "
        f"{texts[base]} on rank {base} (each {event}). {entry.advice}"
    )
