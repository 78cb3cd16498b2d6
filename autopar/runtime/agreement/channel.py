"""`Channel`: ranks exchange records of their next action before they communicate.

Collectives that do not match hang, or abort the process when sizes differ. So each rank first
sends a record of fixed size over a process group used for nothing else. If the records differ,
all ranks raise the same error.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import distributed as dist

from autopar.core.common.groups import advice_for_hangs, gloo_group
from autopar.core.common.row_exchange import RowExchange
from autopar.core.common.world import rank, world, world_size
from autopar.errors import CommunicationError, DisagreementError
from autopar.runtime.agreement.record import (
    HEADER_NUMBERS,
    Entry,
    describe_entry,
    describe_events,
    differences,
    encode,
)
from autopar.runtime.agreement.turn import Turn
from autopar.runtime.watch.collective_log import LOG
from autopar.runtime.watch.hang import watch, where_ranks_are


@dataclass(frozen=True)
class Exchanged:
    """Data of all ranks after an exchange."""

    payloads: list[bytes]  # by rank; empty if no rank sent any
    samples: list[list[int]]  # `SAMPLE_NUMBERS` by rank


@dataclass
class Channel:
    """A process group over which all ranks exchange records.

    Attributes:
        averages_gradients: whether a model has `batch="local"`, so that a gradient that the loop
            computes beside its calls may be that of this rank's rows.
        turn: lets one thread at a time use it, and modules that do.
    """

    rows: RowExchange
    num_exchanges: int = 0
    num_modules: int = 0
    averages_gradients: bool = False
    finish_pending: Callable[[], Exchanged] | None = None
    turn: Turn = field(default_factory=Turn)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.rows.size

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.rows.group()
        if group is None:
            raise CommunicationError(
                "the process group was destroyed: call destroy_process_group() after the last "
                "call of the model"
            )
        return group

    def exchange(
        self, event: str, entries: Sequence[Entry] = (), payload: bytes = b""
    ) -> Exchanged:
        with self.turn:
            self.start_exchange(event, entries, payload)
            exchanged = self.finish_exchange()
        assert exchanged is not None
        return exchanged

    def start_exchange(
        self,
        event: str,
        entries: Sequence[Entry] = (),
        payload: bytes = b"",
        samples: Sequence[int] = (),
        then: Callable[[Exchanged], None] | None = None,
    ) -> None:
        """Starts an exchange; `finish_exchange` must run before the ranks communicate otherwise."""
        self.finish_exchange()
        self.num_exchanges += 1
        own = encode(event, entries, len(payload), samples)
        _ = self.group  # raises if it was destroyed
        with explaining_failed_wait():
            receive = self.rows.start(own)

        def finish() -> Exchanged:
            records_of = f"the records of all ranks (it {event})"
            with explaining_failed_wait(), LOG.waiting(records_of):
                records = receive()
            if any(r[0] != own[0] or r[HEADER_NUMBERS:] != own[HEADER_NUMBERS:] for r in records):
                self._check_equal(event, entries, records)
            with explaining_failed_wait():
                payloads = self._gather_payloads(payload, [r[1] for r in records])
            exchanged = Exchanged(payloads, [r[2:HEADER_NUMBERS] for r in records])
            if then is not None:
                then(exchanged)
            return exchanged

        self.finish_pending = finish

    def finish_exchange(self) -> Exchanged | None:
        """Finishes the exchange in progress; all ranks raise alike if entries or events differ."""
        # Cleared first: after an error nobody sends these records again, so no later call waits.
        finish, self.finish_pending = self.finish_pending, None
        return None if finish is None else finish()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        table = tensor.new_empty(self.size, tensor.numel())
        dist.all_gather(list(table.unbind()), tensor, group=self.group)
        return table

    def _gather_payloads(self, payload: bytes, sizes: Sequence[int]) -> list[bytes]:
        """The bytes of every rank, by rank; sends nothing if all are empty."""
        if not any(sizes):
            return []
        padded = bytearray(payload.ljust(max(sizes), b"\0"))
        table = self._gather(torch.frombuffer(padded, dtype=torch.uint8))
        return [bytes(row[:size].numpy()) for row, size in zip(table, sizes, strict=True)]

    def _check_equal(self, event: str, entries: Sequence[Entry], records: list[list[int]]) -> None:
        """Raises if ranks of a group differ; every rank has the same records."""
        same_event = len({record[0] for record in records}) == 1
        differing = differences(records, len(entries)) if same_event else {}
        if same_event and not differing:
            return
        text = json.dumps([event, *(entries[place].told for place in differing)]).encode()
        with explaining_failed_wait():
            sizes = self._gather(torch.tensor([len(text)]))[:, 0].tolist()
            texts = [json.loads(own) for own in self._gather_payloads(text, sizes)]
        if not same_event:
            raise DisagreementError(describe_events([own[0] for own in texts]))
        lines = [
            describe_entry(event, entries[place], odd, [own[i] for own in texts])
            for i, (place, odd) in enumerate(differing.items(), 1)
        ]
        raise entries[next(iter(differing))].error("\n".join(lines))


@contextlib.contextmanager
def explaining_failed_wait() -> Iterator[None]:
    """Turns a failed wait into a CommunicationError that says where all ranks are."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"{where_ranks_are()}. Perhaps another rank died, raised an error, left its loop "
            "early, or is busy. Look for the first error among all ranks' output. "
            f"({str(error).splitlines()[0]}){advice_for_hangs()}"
        ) from error


_OPEN: weakref.WeakKeyDictionary[dist.ProcessGroup, Channel] = weakref.WeakKeyDictionary()
"""The channel of each world."""


def channel() -> Channel | None:
    """The channel of the current world, None for one rank. All ranks open it at once."""
    if world_size() == 1:
        return None
    group = world()
    found = _OPEN.get(group)
    if found is None:
        found = _OPEN[group] = _open(group)
        watch()
    return found


def finish_exchange() -> None:
    """Finishes exchanges in progress, if any; programs call it before they communicate."""
    for found in _OPEN.values():
        if found.finish_pending is not None:
            found.finish_exchange()


def _open(beside: dist.ProcessGroup) -> Channel:
    try:
        rows = RowExchange(gloo_group(beside, use="records"))
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {rank()} could not connect to the other ranks over gloo: another rank "
            "died, raised an error, or does not call autopar.compile. "
            f"({str(error).splitlines()[0]})"
        ) from error
    return Channel(rows)
