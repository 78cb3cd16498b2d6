"""One rank of a race: builds every contender, then runs them in turn, step by step.

Started by `benchmarks.launch` with torchrun's environment; its one argument is the job's folder.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import field as default
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import Contender, Step, build_plain, field
from benchmarks.launch import Job, write_atomically
from benchmarks.memory import ProfilerCounter
from benchmarks.models import CASES, Case

SEED = 0


@dataclass
class Entry:
    """A contender in the race and its figures on this rank."""

    contender: Contender
    step: Step | None = None
    seconds: list[float] = default(default_factory=list)  # of each timed step
    losses: list[Tensor] = default(default_factory=list)  # of every step from the first
    peak_bytes: int = 0  # peak of tensor bytes in the steady state
    error: str | None = None  # reason why it left the race

    def run(self, batch: tuple[Tensor, Tensor]) -> None:
        """Train one step."""
        assert self.step is not None
        self.losses.append(self.step(*batch).detach())


class Race:
    """All contenders of one job, on one rank."""

    counted = 6  # first steps of each contender, whose bytes are counted
    warm = 2  # steps after them that are neither counted nor timed

    def __init__(self, job: Job, folder: Path, case: Case, contenders: Iterable[Contender]) -> None:
        self.job, self.folder, self.case = job, folder, case
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.batches = [self.case.batch(step) for step in range(self.steps)]
        self.control = dist.new_group(backend="gloo")  # no contender's traffic
        self.entries = [Entry(c) for c in contenders if c.name in job.contenders]

    @property
    def steps(self) -> int:
        """Steps that every contender trains, counted, warm and timed."""
        return self.counted + self.warm + self.job.rounds

    def run(self) -> None:
        """Run the whole race; rank 0 writes the outcome."""
        reference = self.reference()
        for entry in self.entries:
            self.attempt(entry, "building", self.prepare)
        gc.collect()
        gc.freeze()  # a contender's garbage collection skips the others' objects
        for number in range(self.job.rounds):
            running = self.running()
            random.Random(number).shuffle(running)  # the same on all ranks
            for entry in running:
                self.attempt(entry, "timing", partial(self.time, number=number))
        outcome = {"reference": reference, "contenders": [self.gather(e) for e in self.entries]}
        if self.rank == 0:
            (self.folder / "outcome.json").write_text(json.dumps(outcome))

    @property
    def reference_threads(self) -> int:
        """Threads of the plain model: those of all ranks, which wait meanwhile."""
        return self.job.threads * self.world_size

    def running(self) -> list[Entry]:
        """Return the entries that are still in the race."""
        return [entry for entry in self.entries if entry.error is None]

    def reference(self) -> list[float]:
        """Return the losses of the plain model on whole batches, trained on rank 0 alone."""
        self.report("training the plain model")
        losses = torch.zeros(self.steps)
        if self.rank == 0:
            torch.set_num_threads(self.reference_threads)
            torch.manual_seed(SEED)
            step = build_plain(self.case)
            losses = torch.stack([step(x, y).detach() for x, y in self.batches])
            torch.set_num_threads(self.job.threads)
        dist.broadcast(losses, 0, group=self.control)
        return losses.tolist()

    def attempt(self, entry: Entry, phase: str, work: Callable[[Entry], None]) -> None:
        """Do `work` on all ranks; a failure on one takes the entry out of the race on all."""
        self.report(phase, entry.contender.name)
        try:
            work(entry)
        except Exception as error:
            entry.error = f"{type(error).__name__}: {error}".strip()
            traceback.print_exc()
            write_atomically(self.folder / f"error.{self.rank}", entry.error)
        failures = torch.tensor(float(entry.error is not None))
        dist.all_reduce(failures, group=self.control)
        if failures:
            errors: list[str | None] = [None] * self.world_size
            dist.all_gather_object(errors, entry.error, group=self.control)
            entry.error = next(error for error in errors if error)
            entry.step = None
            (self.folder / f"error.{self.rank}").unlink(missing_ok=True)

    def prepare(self, entry: Entry) -> None:
        torch.manual_seed(SEED)
        with ProfilerCounter() as counter:
            entry.step = entry.contender.build(self.case)
            for batch in self.batches[: self.counted]:
                with counter.step("training"):
                    entry.run(batch)
        entry.peak_bytes = round(median(counter.peaks()["training"]))
        for batch in self.batches[self.counted :][: self.warm]:
            entry.run(batch)

    def time(self, entry: Entry, number: int) -> None:
        """Time one whole step, from a common start."""
        batch = self.batches[self.counted + self.warm + number]
        dist.barrier(self.control)
        start = time.perf_counter()
        entry.run(batch)
        entry.seconds.append(time.perf_counter() - start)

    def gather(self, entry: Entry) -> dict[str, Any]:
        """Return figures over all ranks: slowest and mean steps, most bytes, mean losses."""
        result: dict[str, Any] = {"contender": entry.contender.name, "error": entry.error}
        if entry.error is None:
            seconds = torch.tensor(entry.seconds, dtype=torch.float64)
            peak, mean = torch.tensor(entry.peak_bytes), seconds / self.world_size
            losses = torch.stack(entry.losses).double() / self.world_size
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=self.control)
            dist.all_reduce(mean, group=self.control)
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=self.control)
            dist.all_reduce(losses, group=self.control)
            result["seconds"], result["mean_seconds"] = seconds.tolist(), mean.tolist()
            result["peak_bytes"] = peak.item()
            result["losses"] = losses.tolist()
        return result

    def report(self, phase: str, contender: str = "") -> None:
        """Write the current phase for the launcher."""
        if self.rank == 0:
            write_atomically(self.folder / "status", f"{phase}\t{contender}")


def main(kind: type[Job], race: Callable[[Any, Path], Race]) -> None:
    """Join the other ranks and run the job."""
    folder = Path(sys.argv[1])
    job = kind(**json.loads((folder / "job.json").read_text()))
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.patience))
    race(job, folder).run()
    dist.destroy_process_group()


def of_peers(job: Job, folder: Path) -> Race:
    case = CASES[job.case]
    return Race(job, folder, case, field(case, dist.get_world_size()))


if __name__ == "__main__":
    main(Job, of_peers)
