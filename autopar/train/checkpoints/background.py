"""`BackgroundWriter`: checkpoints written to disk by a thread, from a copy in host memory.

Training waits for the copy alone. The thread creates the folder, plans, writes and publishes.
It has a process group of its own, so its messages never mix with those of training.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.core.common.groups import gather_values, gloo_group
from autopar.core.common.world import rank
from autopar.core.plan.plan import Plan
from autopar.errors import CheckpointError
from autopar.runtime.agreement.consensus import is_multi_rank
from autopar.train.checkpoints.folder import VALUES, CheckpointFolder, FileSum, Stamp, sums_of
from autopar.train.checkpoints.host_copy import HostCopy
from autopar.train.checkpoints.torch_index import INDEX

PLAN = "plan.json"

# torch says so at every save of a single process, which is nothing to mend.
warnings.filterwarnings("ignore", r"torch\.distributed is disabled, unavailable or uninitialized")


T = TypeVar("T")


class _Failed(Exception):
    """The error of one rank, raised on all."""


@dataclass(frozen=True)
class Copied:
    """State of one moment.

    Attributes:
        tensors: copies in host memory.
        values: plain values of all ranks, pickled.
        own_values: those of this rank, pickled.
        stamp: the run that saves, on rank 0.
        broken: steps of checkpoints that cannot be read.
    """

    tensors: dict[str, Any]
    values: bytes
    own_values: bytes
    plan: Plan | None
    stamp: Stamp
    broken: frozenset[int]


class BackgroundWriter:
    """Writes one checkpoint at a time.

    Attributes:
        folder: folder of the run, on a file system that all ranks share.
        keep: number of checkpoints that stay.
    """

    def __init__(self, folder: CheckpointFolder, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-checkpoint")
        self._copy = HostCopy()
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[None] | None = None

    def start(
        self,
        step: int,
        tensors: Mapping[str, Any],
        values: tuple[Mapping[str, Any], Mapping[str, Any]],
        plan: Plan | None,
        stamp: Stamp,
        broken: Iterable[int],
    ) -> None:
        """Copies the state and begins to write it; `finish` must have run before.

        `values` are plain values of all ranks, and this rank's own. Checkpoints that are `broken`
        do not count among those that stay.
        """
        if is_multi_rank() and self._group is None:
            world = dist.group.WORLD
            assert world is not None
            self._group = gloo_group(world, use="checkpoints")
        # Pickled now: schedulers and loaders change these values while the thread writes.
        copied = Copied(
            self._copy.take(tensors),
            pickle.dumps(values[0]),
            pickle.dumps(values[1]),
            plan,
            stamp,
            frozenset(broken),
        )
        self._writing = self._thread.submit(self._write, step, copied)

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written, the same on every rank.
        """
        writing, self._writing = self._writing, None
        error = None if writing is None else writing.exception()
        if error is not None:
            raise CheckpointError(
                f"a checkpoint was not written to {self.folder.path}: {_reason(error)}. "
                "Earlier checkpoints are whole. Free space or give another folder."
            ) from error

    def _write(self, step: int, copied: Copied) -> None:
        own = self._together(partial(self._begin, step, copied))
        values = {**pickle.loads(copied.values), "ranks": [pickle.loads(each) for each in own]}
        sums = self._together(partial(self._save, step, copied, values))
        every = {k: v for part in sums for k, v in part.items()}
        self._together(partial(self._publish, step, copied, every))

    def _begin(self, step: int, copied: Copied) -> bytes:
        if rank() == 0:
            begun = self.folder.begin(step)
            if copied.plan is not None:
                copied.plan.save(begun / PLAN)
        return copied.own_values

    def _save(self, step: int, copied: Copied, values: Mapping[str, Any]) -> dict[str, FileSum]:
        begun = self.folder.partial_of(step)
        save(
            copied.tensors,
            storage_writer=FileSystemWriter(begun),
            process_group=self._group,
            no_dist=self._group is None,
        )
        return _sums(begun, values)

    def _publish(self, step: int, copied: Copied, sums: Mapping[str, FileSum]) -> None:
        if rank() == 0:
            self.folder.publish(step, sums, copied.stamp)
            self.folder.prune(self.keep, copied.stamp.run, copied.broken - {step})

    def _together(self, work: Callable[[], T]) -> list[T]:
        """Results of the same work on all ranks; an error of one ends the write on all, at once."""
        if self._group is None:
            return [work()]
        # Errors are gathered like results: a rank that raised alone would leave the others waiting
        # in the next collective.
        own: tuple[Any, str] = None, ""
        try:
            own = work(), ""
        except Exception as error:
            own = None, _reason(error)
        parts: list[tuple[Any, str]] = gather_values(own, self._group)
        for number, (_, reason) in enumerate(parts):
            if reason:
                raise _Failed(f"rank {number}: {reason}")
        return [result for result, _ in parts]


def _sums(begun: Path, values: Mapping[str, Any]) -> dict[str, FileSum]:
    """Writes what rank 0 alone writes; sums of the files of this rank."""
    own = sums_of(begun, [f"__{rank()}_"])
    if rank() == 0:
        torch.save(values, begun / VALUES)
        own |= sums_of(begun, [INDEX, VALUES, PLAN])
    return own


def _reason(error: BaseException) -> str:
    """The first cause of a failed write, in one line."""
    if isinstance(error, _Failed):
        return str(error)
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
