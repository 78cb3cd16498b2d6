"""`Channel`: ranks tell each other what they are about to do, before they communicate.

Collectives that do not match end in a hang, or abort the process when sizes differ. So each rank
first sends a record of one fixed size over a process group that carries nothing else. Ranks that do
different things meet there, find out, and all raise the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import distributed as dist

from autopar._torch import default_store, group_timeout
from autopar.errors import AutoparError, CommunicationError, DisagreementError

MAX_ENTRIES = 16
"""Things that a record has room for."""

SAMPLE_NUMBERS = 16
"""Numbers of a record that ranks show each other without comparing them here."""

HEADER_NUMBERS = 2 + SAMPLE_NUMBERS
"""Numbers of a record before its entries: the event, the bytes of its payload, and those shown."""

MAX_TEXT_CHARS = 400
"""Characters of a value in an error."""

PEER_REPLY_S = 1.5
"""Seconds that a rank whose wait failed listens for what the other ranks wait for."""


@dataclass(frozen=True)
class Entry:
    """A value that must be equal on all ranks, or on those with an equal `among`.

    Attributes:
        name: of the value, as a person calls it.
        value: an int is compared as it is, anything else by its text.
        among: ranks with another `among` are not compared.
        advice: one or two sentences for the error.
        error: class of the error.
        shown: text for people, by default that of `value`.
    """

    name: str
    value: object
    group: object = ""
    advice: str = ""
    error: type[AutoparError] = DisagreementError
    shown: str | None = None

    @property
    def text(self) -> str:
        """The value as an error shows it."""
        text = str(self.value) if self.shown is None else self.shown
        return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 3] + "..."


def stable_hash(value: object) -> int:
    """A number of 63 bits that differs, almost surely, between different texts."""
    return value if type(value) is int and abs(value) < 2**62 else _hashed(str(value))


@lru_cache(maxsize=4096)
def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class Exchanged:
    """Everything that the ranks brought to a meeting.

    Attributes:
        payloads: by rank; empty if no rank brought any.
        shown: by rank, `SAMPLE_NUMBERS` numbers each.
    """

    payloads: list[bytes]
    samples: list[list[int]]


@dataclass(frozen=True)
class PendingExchange:
    """A record on its way to the other ranks.

    Attributes:
        event: what this rank is about to do.
        entries: what must be equal on all ranks.
        payload: is given to every rank.
        numbers: the record.
        table: the records of all ranks, once `work` is done.
        work: the collective under way.
        then: is called with what all ranks brought.
    """

    event: str
    entries: Sequence[Entry]
    payload: bytes
    numbers: Sequence[int]
    table: torch.Tensor
    work: dist.Work
    then: Callable[[Exchanged], None] | None


@dataclass
class Channel:
    """The ranks of the world, and a process group for records alone.

    Attributes:
        reference: to the group, over gloo, which torch keeps alive until it is destroyed.
        rank: this one.
        size: number of ranks.
        meetings: how many there have been.
        modules: how many modules have been given a number.
        announced: the record on its way, which is settled before the next one leaves.
    """

    group_reference: weakref.ref[dist.ProcessGroup]
    rank: int
    size: int
    num_exchanges: int = 0
    num_modules: int = 0
    pending: PendingExchange | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group for records.

        Raises:
            CommunicationError: it was destroyed.
        """
        group = self.group_reference()
        if group is None:
            raise CommunicationError(
                "the process group was destroyed: call destroy_process_group() after the last "
                "call of the model"
            )
        return group

    def exchange(
        self,
        event: str,
        entries: Sequence[Entry] = (),
        payload: bytes = b"",
        shown: Sequence[int] = (),
    ) -> Exchanged:
        """Waits until every rank says the same, and hands payloads around.

        Args:
            event: what this rank is about to do, as a verb with its object: "calls Model".
            entries: what must be equal; the same names on every rank.
            payload: is given to every rank.
            shown: at most `SAMPLE_NUMBERS` numbers, which every rank sees.

        Raises:
            DisagreementError: on every rank alike, if the events or entries differ.
            CommunicationError: a rank did not come before the timeout.
        """
        self.start_exchange(event, entries, payload, shown)
        met = self.finish_exchange()
        assert met is not None
        return met

    def start_exchange(
        self,
        event: str,
        entries: Sequence[Entry] = (),
        payload: bytes = b"",
        shown: Sequence[int] = (),
        then: Callable[[Exchanged], None] | None = None,
    ) -> None:
        """Begins a meeting; `finish_exchange` ends it, before this rank communicates with others.

        Args:
            event, entries, payload, shown: as for `meet`.
            then: is called with what all ranks brought.

        Raises:
            DisagreementError, CommunicationError: from the meeting before, if that was not ended.
        """
        self.finish_exchange()
        self.num_exchanges += 1
        names = ",".join(entry.name for entry in entries)
        numbers = [_hashed(f"{event}|{names}"), len(payload), *shown]
        numbers += [0] * (HEADER_NUMBERS - len(numbers))
        for entry in entries:
            numbers += [stable_hash(entry.value), stable_hash(entry.group)]
        numbers += [0] * (HEADER_NUMBERS + 2 * MAX_ENTRIES - len(numbers))
        own = torch.tensor(numbers)
        table = own.new_empty(self.size, own.numel())
        with self.waiting(event):
            work = dist.all_gather(list(table.unbind()), own, group=self.group, async_op=True)
        self.pending = PendingExchange(event, entries, payload, numbers, table, work, then)

    def finish_exchange(self) -> Exchanged | None:
        """Ends the meeting that has begun; None if there is none.

        Raises:
            DisagreementError: on every rank alike, if the events or entries differ.
            CommunicationError: a rank did not come before the timeout.
        """
        if self.pending is None:
            return None
        begun, self.pending = self.pending, None
        with self.waiting(begun.event):
            begun.work.wait()
            table = begun.table.tolist()
        own = begun.numbers
        if any(row[0] != own[0] or row[HEADER_NUMBERS:] != own[HEADER_NUMBERS:] for row in table):
            self._compare(begun.event, begun.entries, table)
        with self.waiting(begun.event):
            payloads = self._payloads(begun.payload, [row[1] for row in table])
        met = Exchanged(payloads, [row[2:HEADER_NUMBERS] for row in table])
        if begun.then is not None:
            begun.then(met)
        return met

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        table = own.new_empty(self.size, own.numel())
        dist.all_gather(list(table.unbind()), own, group=self.group)
        return table

    def _payloads(self, own: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Gathers the bytes of every rank, by rank; nothing travels if all are empty."""
        if not any(sizes):
            return []
        padded = bytearray(own.ljust(max(sizes), b"\0"))
        table = self._gathered(torch.frombuffer(padded, dtype=torch.uint8))
        return [bytes(row[:size].numpy()) for row, size in zip(table, sizes, strict=True)]

    def _compare(self, event: str, entries: Sequence[Entry], table: list[list[int]]) -> None:
        """Raises if ranks differ where they must not; every rank sees the same table."""
        same_event = len({row[0] for row in table}) == 1
        differing = [
            (place, entry)
            for place, entry in enumerate(entries)
            if same_event and _differs([row[HEADER_NUMBERS + 2 * place :][:2] for row in table])
        ]
        if same_event and not differing:
            return
        said = [json.loads(text) for text in self._said(event, [e for _, e in differing])]
        if not same_event:
            raise DisagreementError(_of_events([own[0] for own in said]))
        lines = [
            _of_entry(
                event, entry, index, said, [row[HEADER_NUMBERS + 2 * place :][:2] for row in table]
            )
            for index, (place, entry) in enumerate(differing, 1)
        ]
        raise differing[0][1].error("\n".join(lines))

    def _said(self, event: str, entries: Iterable[Entry]) -> list[bytes]:
        own = json.dumps([event, *(entry.text for entry in entries)]).encode()
        with self.waiting(event):
            sizes = self._gathered(torch.tensor([len(own)]))[:, 0].tolist()
            return self._payloads(own, sizes)

    @contextlib.contextmanager
    def waiting(self, event: str) -> Iterator[None]:
        """Turns a failed wait into an error that says which ranks did not come.

        Raises:
            CommunicationError: the wait failed.
        """
        began = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            waited = time.monotonic() - began
            others = self._who_waits(event)
            absent = sorted(set(range(self.size)) - set(others))
            doing = "".join(f" Rank {r} waits too: it {what}." for r, what in others.items()
                            if r != self.rank)  # fmt: skip
            who = f"rank(s) {absent} did not come" if absent else "the connection broke"
            raise CommunicationError(
                f"rank {self.rank} {event} and waited {waited:.1f} s for the other ranks; {who}: "
                "another rank died, raised an error, left its loop early, or is busy with "
                f"something else.{doing} Look for the first error among all ranks' output. "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _who_waits(self, event: str) -> dict[int, str]:
        """The ranks whose wait failed at this meeting, and what each was about to do.

        They leave word in the store of the process group, which may have gone with its rank.
        """
        found = {self.rank: event}
        with contextlib.suppress(RuntimeError):
            store = default_store()
            place = f"autopar/{self.group.group_name}/{self.num_exchanges}"
            store.set(f"{place}/{self.rank}", event)
            until = time.monotonic() + PEER_REPLY_S
            while len(found) < self.size and time.monotonic() < until:
                for rank in set(range(self.size)) - set(found):
                    if store.check([f"{place}/{rank}"]):
                        found[rank] = store.get(f"{place}/{rank}").decode()
                time.sleep(0.05)
        return dict(sorted(found.items()))


def _differs(pairs: Iterable[Sequence[int]]) -> bool:
    """Whether ranks that are compared hold different values, of pairs (value, among)."""
    known: dict[int, int] = {}
    return any(known.setdefault(among, value) != value for value, among in pairs)


def _of_events(events: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, event in enumerate(events):
        ranks.setdefault(event, []).append(rank)
    doing = "; ".join(f"rank(s) {own}: {event}" for event, own in ranks.items())
    return (
        f"the ranks do different things at the same time: {doing}. Every rank must call the model, "
        "run backward, clip and save in the same order and equally often."
    )


def _of_entry(
    event: str,
    entry: Entry,
    index: int,
    said: Sequence[Sequence[str]],
    pairs: Sequence[Sequence[int]],
) -> str:
    """One line about ranks that differ from the first one that they are compared with."""
    first: dict[int, int] = {}
    odd: list[int] = []
    for rank, (value, among) in enumerate(pairs):
        if pairs[first.setdefault(among, rank)][0] != value:
            odd.append(rank)
    base = first[pairs[odd[0]][1]]
    return (
        f"rank(s) {odd} {entry.name} than rank {base}: {said[odd[0]][index]} on rank {odd[0]}, "
        f"{said[base][index]} on rank {base} (each {event}). {entry.advice}"
    )


_OPEN: tuple[weakref.ref[dist.ProcessGroup], Channel] | None = None


def channel() -> Channel | None:
    """The channel of the running world; None for one rank. All ranks open it at once."""
    global _OPEN
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    world = dist.group.WORLD
    assert world is not None
    if _OPEN is None or _OPEN[0]() is not world:
        _OPEN = weakref.ref(world), _opened(world)
    return _OPEN[1]


def finish_exchange() -> None:
    """Ends the meeting that has begun, if any: called before a program communicates.

    Raises:
        DisagreementError: on every rank alike, if ranks are about to do different things.
        CommunicationError: a rank did not come before the timeout.
    """
    if _OPEN is not None:
        _OPEN[1].finish_exchange()


def _opened(world: dist.ProcessGroup) -> Channel:
    try:
        group = dist.new_group(
            backend="gloo", timeout=group_timeout(world), group_desc="autopar: records"
        )
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {dist.get_rank()} could not connect to the other ranks over gloo: another rank "
            "died, raised an error, or does not call autopar.compile. "
            f"({str(error).splitlines()[0]})"
        ) from error
    assert isinstance(group, dist.ProcessGroup)
    return Channel(weakref.ref(group), dist.get_rank(), dist.get_world_size())
