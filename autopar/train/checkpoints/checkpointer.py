"""`Checkpointer`: saves a training run beside training, and resumes it under any plan."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from torch import nn
from torch.optim import Optimizer

from autopar.core.common.checks import count
from autopar.core.common.notices import say, warn_once
from autopar.core.common.world import rank, world_size
from autopar.core.environment import is_verified
from autopar.core.waiting import awaited
from autopar.errors import BatchError, CheckpointError, CheckpointWarning, StrategyError
from autopar.runtime.agreement.consensus import (
    broadcast_from_rank0,
    gather_objects,
    is_multi_rank,
)
from autopar.runtime.module import DistributedModule
from autopar.train.checkpoints.background import BackgroundWriter
from autopar.train.checkpoints.folder import VALUES, CheckpointFolder, Stamp, faults_of
from autopar.train.checkpoints.plain_data import read_values
from autopar.train.checkpoints.preemption import Preemption
from autopar.train.checkpoints.training_state import TrainingState

MAX_STEPS = 10**15
"""Most steps of a run, beyond which a number is taken for a mistake."""

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds before the last checkpoint of a run is tried again."""


class Checkpointer:
    """Saves a run every so many steps, and resumes it from the newest whole checkpoint.

    A checkpoint holds the model, optimizers, scheduler, scaler, random state, place in the data,
    step and plan. Any plan and number of ranks loads it. Training waits for a copy of the state;
    a thread writes the copy to disk. A checkpoint appears under its name only when it is whole.

    Example:
        checkpointer = autopar.Checkpointer("runs/gpt", model, optimizer, every=100)
        for step, (x, y) in checkpointer.steps(loader, total=10_000):
            model(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        folder: folder of this run, on a file system that all ranks share.
        model: from `autopar.compile`, with `example_inputs` if there are several ranks.
        optimizer: one optimizer, or several.
        scheduler: learning-rate scheduler; several go into `extra`.
        scaler: a GradScaler.
        extra: other objects with `state_dict` and `load_state_dict`, by name, such as an EMA.
        every: steps between checkpoints; None saves at the end and on SIGTERM alone.
        keep: number of whole checkpoints of this run that stay; those of other runs do too.

    Raises:
        StrategyError: an argument is invalid.
        CheckpointError: ranks do not share the folder, or it cannot be written. When saving begins:
            another job saves into the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | None = None,
        every: int | None = None,
        keep: int = 3,
    ) -> None:
        if every is not None:
            count("every", every)
        count("keep", keep)
        if isinstance(model, DistributedModule) and model.plan is None and is_multi_rank():
            raise StrategyError(
                "this model has no plan yet, so nobody knows which rank holds what: give compile "
                "example_inputs=, or call the model once before Checkpointer"
            )
        self.every = every
        self._folder = CheckpointFolder(Path(folder).absolute())
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._state = TrainingState(model, optimizers, scheduler, scaler, dict(extra or {}))
        self._writer = BackgroundWriter(self._folder, keep)
        self._resumed = False
        self._saved_step = self._step = 0
        self._stamp: Stamp | None = None  # of the last checkpoint that this run read or wrote
        self._broken: set[int] = set()
        self._lock: IO[str] | None = None  # held by rank 0 from the first save on
        _check_shared(self._folder.path)

    @property
    def step(self) -> int:
        """Number of steps behind, those before a restart included."""
        return self._step

    def resume(self, *, trusted: bool = False) -> int:
        """Loads the newest whole checkpoint and returns its step, 0 if there is none.

        The newest is the last one of the run that began last in this folder; from then on this is
        that run. A checkpoint with a missing, short or changed file is skipped with a warning.

        Args:
            trusted: reads files that hold objects, as checkpoints before 0.1 do. Whoever can write
                such a file can run code in this process.

        Raises:
            CheckpointError: a whole checkpoint is of another model or optimizer, or holds other
                objects than tensors and plain data.
        """
        self._resumed = True
        for saved in broadcast_from_rank0(self._folder.saved):
            if faults := _faults(saved.path):
                warn_once(CheckpointWarning, f"{saved.path} is skipped: {'; '.join(faults[:3])}")
                self._broken.add(saved.step)
                continue
            values = read_values(saved.path / VALUES, trusted=trusted)
            self._state.restore(saved.path, values, trusted=trusted)
            self._step = self._saved_step = saved.step
            self._stamp = saved.stamp
            say(f"resumes after step {saved.step} of {saved.path}")
            break
        return self._step

    def save(self, step: int | None = None, *, wait: bool = False) -> None:
        """Begins a checkpoint after `step`; `wait` returns when it is on disk.

        All ranks call it. The state may change as soon as it returns. The first call takes longer,
        for it allocates memory for the copy. Under `autopar verify` nothing is saved.

        Raises:
            CheckpointError: this checkpoint (with `wait`), or the one before, was not written, or
                another job saves into the folder.
            StrategyError: `step` is no whole number from 0 on, or a state holds other objects than
                tensors and plain data.
        """
        if step is not None:
            count("step", step, 0, MAX_STEPS)
        self._step = self._step if step is None else step
        if is_verified():  # the second of its two runs would resume from what the first saved
            return
        self._writer.finish()
        self._broken.discard(self._saved_step)  # it has been written anew
        self._take_folder()
        plan = getattr(self._state.model, "plan", None)
        values = self._state.values(self._step), self._state.own_values()
        stamp = self._next_stamp()
        self._writer.start(self._step, self._state.tensors(), values, plan, stamp, self._broken)
        self._saved_step, self._stamp = self._step, stamp
        if wait:
            self._writer.finish()

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk.

        Raises:
            CheckpointError: it was not written.
        """
        self._writer.finish()

    def steps(
        self, loader: Iterable[Any], *, total: int | None = None, epochs: int | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yields the number of each step, from 1, and its batch; saves and resumes by itself.

        The loop ends after `total` steps or `epochs` epochs, those before a restart included; by
        default after one epoch. On SIGTERM all ranks save after the same step and exit with 143.

        Args:
            loader: batches; the same ones in every run, or an object that keeps its own place.
            total: number of steps; None for no limit.
            epochs: number of times that the loader is read; None for no limit.

        Warns:
            CheckpointWarning: a checkpoint could not be written; training goes on.

        Raises:
            CheckpointError: the last checkpoint was not written, for half a minute, or another job
                saves into the folder.
        """
        self._take_folder()
        if not self._resumed:
            self.resume()
        last_epoch = epochs if epochs is not None or total is not None else 1
        preemption, was_empty = Preemption(), False
        with preemption.listening():
            while not self._is_over(total, last_epoch):
                before = self._step
                for batch in self._state.data.epoch_batches(loader):
                    self._step += 1
                    yield self._step, batch
                    if preemption.is_last(self._step):
                        self._save_last()
                        raise SystemExit(preemption.exit_status())
                    if self.every and self._step % self.every == 0:
                        self._save_beside()
                    if total is not None and self._step >= total:
                        break
                # A run saved at the end of an epoch resumes with no batches left: one empty epoch
                # is no error.
                if was_empty and self._step == before:
                    raise BatchError("the loader gives no batches: give one with more rows")
                was_empty = self._step == before
        self._save_last()

    def _take_folder(self) -> None:
        """Locks the folder for this job; raises CheckpointError on every rank if another has it.

        Runs of `autopar verify` write nothing, so they can run beside the job.
        """
        if is_verified():
            return
        broadcast_from_rank0(self._lock_folder)

    def _lock_folder(self) -> None:
        self._lock = self._folder.lock(self._lock)

    def _next_stamp(self) -> Stamp:
        """The stamp of the next checkpoint: of the run that was resumed, or of a new one.

        Rank 0 alone writes it, so the others may have any.
        """
        before = self._folder.saved() if rank() == 0 else []
        if self._stamp is None:
            number = max((each.stamp.number for each in before), default=0) + 1
            return Stamp(secrets.token_hex(8), number, 1)
        run = self._stamp.run
        # Broken checkpoints after the resumed one are still there: the next is later than these.
        last = max((each.stamp.save for each in before if each.stamp.run == run), default=0)
        return Stamp(run, self._stamp.number, max(last, self._stamp.save) + 1)

    def _is_over(self, total: int | None, last_epoch: int | None) -> bool:
        done = total is not None and self._step >= total
        return done or (last_epoch is not None and self._state.data.epoch >= last_epoch)

    def _save_beside(self) -> None:
        """Saves; a checkpoint that cannot be written is a warning, this one or the last."""
        for save in (self._writer.finish, self.save):
            try:
                save()
            except CheckpointError as error:
                warn_once(CheckpointWarning, str(error))

    def _save_last(self) -> None:
        """Saves the step reached, again after pauses if there is no room for it."""
        for pause_s in (0.0, *PAUSES_S):
            time.sleep(pause_s)
            try:
                self._writer.finish()
                if self._saved_step != self._step:
                    self.save(wait=True)
                return
            except CheckpointError as error:
                # The failed save left its step here, and the next try would take it for written.
                self._saved_step, failure = 0, error
                warn_once(CheckpointWarning, f"{error} It is tried again.")
        raise failure


def _faults(folder: Path) -> list[str]:
    """Faults of a checkpoint; each rank reads a part of its files."""
    part = partial(faults_of, folder, rank(), world_size())
    own = awaited(part, lambda: f"the checksums of {folder}", math.inf, say)
    if not is_multi_rank():
        return own
    return sorted({fault for faults in gather_objects(own) for fault in faults})


def _check_shared(folder: Path) -> None:
    """Raises CheckpointError on every rank if ranks do not see one folder."""
    name = broadcast_from_rank0(lambda: _write_probe(folder))
    seen = [folder.joinpath(name).exists()]
    if is_multi_rank():
        seen = gather_objects(seen[0])
    if rank() == 0:
        folder.joinpath(name).unlink()
    if not all(seen):
        blind = [number for number, sees in enumerate(seen) if not sees]
        raise CheckpointError(
            f"rank(s) {blind} do not see what rank 0 writes to {folder}: give a folder on a file "
            "system that all nodes share"
        )


def _write_probe(folder: Path) -> str:
    name = f".probe-{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath(name).touch()
    except (OSError, ValueError) as error:  # ValueError: a NUL or half of a pair in the name
        reason = getattr(error, "strerror", None) or "no name of a folder"
        raise CheckpointError(
            f"{folder} cannot be written ({reason}): give another folder"
        ) from error
    return name
