"""`DataPosition`: the place in a data loader, kept so that a resumed run reads the next batch.

A loader with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) keeps its own
place. Any other is read again from the start of the epoch, with the random state of that start, up
to the batch that comes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from autopar.train.checkpoints.random_state import RandomState


class DataPosition:
    """Place in the data: epochs and batches behind, and the random state of the epoch's start.

    Attributes:
        epoch: number of the running epoch, from 0.
        batches: batches of it that are done.
    """

    def __init__(self) -> None:
        self.epoch = self.batches = 0
        self._epoch_start: RandomState | None = None
        self._loader: Any = None
        self._loader_state: Any = None

    def epoch_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of the running epoch that are left, counted as they are asked for."""
        self._loader = loader
        _set_epoch(loader, self.epoch)
        # Starting a loader and skipping batches draw random numbers. Training goes on with those
        # that the run was saved with.
        current = RandomState.now()
        if self._loader_state is not None and _keeps_place(loader):
            self._loader.load_state_dict(self._loader_state)
            remaining = iter(loader)
            current.restore()
        elif self.batches:
            remaining = self._skip(loader)
            current.restore()
        else:
            self._epoch_start = current
            remaining = iter(loader)
        self._loader_state = None
        for batch in remaining:
            # Counted first, so that a checkpoint saved in the loop's body includes this batch.
            self.batches += 1
            yield batch
        self.epoch, self.batches, self._epoch_start = self.epoch + 1, 0, None

    def _skip(self, loader: Iterable[Any]) -> Iterator[Any]:
        if self._epoch_start is not None:
            self._epoch_start.restore()
        remaining = iter(loader)
        for _ in islice(remaining, self.batches):
            pass
        return remaining

    def state_dict(self) -> dict[str, Any]:
        """The place as plain values."""
        keeps = self._loader is not None and _keeps_place(self._loader)
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "epoch_start": None if self._epoch_start is None else self._epoch_start.state_dict(),
            "loader": self._loader.state_dict() if keeps else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a place; the next epoch's batches start there."""
        self.epoch, self.batches = state["epoch"], state["batches"]
        start = state["epoch_start"]
        self._epoch_start = None if start is None else RandomState.of(start)
        self._loader_state = state["loader"]


def _keeps_place(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tells the epoch to samplers that shuffle by it, as DistributedSampler does."""
    for sampler in (
        loader,
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
    ):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
