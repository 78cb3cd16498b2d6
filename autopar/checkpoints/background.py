"""`BackgroundWriter`: checkpoints written to disk by a thread, from a copy in host memory.

Training waits for the copy alone. Ranks talk over a process group of the writer's own, so their
messages never mix with those of training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save

from autopar.checkpoints.folder import CheckpointFolder, FileSum, sums_of
from autopar.common.groups import gloo_group
from autopar.common.world import rank
from autopar.errors import CheckpointError
from autopar.report.plan import Plan
from autopar.runtime.agreement.consensus import broadcast_from_rank0, gather_objects, is_multi_rank

VALUES = "training.pt"
"""File of the step, schedules, random states and places in the data, written by rank 0."""

PLAN = "plan.json"

# torch says so at every save of a single process, which is nothing to mend.
warnings.filterwarnings("ignore", r"torch\.distributed is disabled, unavailable or uninitialized")


class BackgroundWriter:
    """Writes one checkpoint at a time.

    Attributes:
        folder: folder of the run, on a file system that all ranks share.
        keep: number of checkpoints that stay.
    """

    def __init__(self, folder: CheckpointFolder, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-checkpoint")
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.cuda.is_available(),
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=torch.cuda.is_available(),
            )
        )
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[None] | None = None

    def start(
        self, step: int, tensors: Mapping[str, Any], values: Mapping[str, Any], plan: Plan | None
    ) -> None:
        """Copies the state and begins to write it; `finish` must have run before."""
        if is_multi_rank() and self._group is None:
            world = dist.group.WORLD
            assert world is not None
            self._group = gloo_group(world, use="checkpoints")
        broadcast_from_rank0(partial(self._begin, step, plan))
        staged = self._stager.stage(dict(tensors))
        assert isinstance(staged, dict)
        self._writing = self._thread.submit(self._write, step, staged, dict(values))

    def _begin(self, step: int, plan: Plan | None) -> None:
        try:
            begun = self.folder.begin(step)
            if plan is not None:
                plan.save(begun / PLAN)
        except OSError as error:
            raise CheckpointError(
                f"{self.folder.path} cannot be written: {error.strerror}"
            ) from error

    def finish(self) -> None:
        """Waits for the checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written, the same on every rank.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        error = writing.exception()
        own = "" if error is None else _reason(error)
        reasons = gather_objects(own) if is_multi_rank() else [own]
        failed = [(number, text) for number, text in enumerate(reasons) if text]
        if failed:
            number, text = failed[0]
            raise CheckpointError(
                f"a checkpoint was not written to {self.folder.path}: rank {number}: {text}. "
                "Earlier checkpoints are whole. Free space or give another folder."
            ) from error

    def _write(self, step: int, staged: dict[str, Any], values: dict[str, Any]) -> None:
        begun = self.folder.partial_of(step)
        save(
            staged,
            storage_writer=FileSystemWriter(begun),
            process_group=self._group,
            no_dist=self._group is None,
        )
        sums = self._gather(partial(_sums, begun, values))
        if rank() == 0:
            self.folder.publish(step, sums)
            self.folder.prune(self.keep)

    def _gather(self, sums: Callable[[], dict[str, FileSum]]) -> dict[str, FileSum]:
        """Sums of all ranks' files; an error of one rank ends the write on all, at once."""
        if self._group is None:
            return sums()
        try:
            own = sums(), ""
        except Exception as error:
            own = {}, _reason(error)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own, group=self._group)
        for number, (_, reason) in enumerate(parts):
            if reason:
                raise CheckpointError(f"rank {number}: {reason}")
        return {name: value for part, _ in parts for name, value in part.items()}


def _sums(begun: Path, values: Mapping[str, Any]) -> dict[str, FileSum]:
    """Writes what rank 0 alone writes; sums of the files of this rank."""
    own = sums_of(begun, [f"__{rank()}_"])
    if rank() == 0:
        torch.save(values, begun / VALUES)
        own |= sums_of(begun, [".metadata", VALUES, PLAN])
    return own


def _reason(error: BaseException) -> str:
    """The first cause of a failed write, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
