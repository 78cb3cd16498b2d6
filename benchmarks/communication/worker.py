"""One rank of a race over an emulated network: builds every contender, then runs them in turn.

Started by `benchmarks.communication.__main__` inside a node; its one argument is the job's folder.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.network import shape_here
from benchmarks.communication.counters import sent_bytes
from benchmarks.communication.field import CASES, Way, bucket_shares, contenders, planned_bytes
from benchmarks.communication.horovod import Horovod
from benchmarks.launch import Job
from benchmarks.worker import SEED, Entry, Race


@dataclass(frozen=True)
class NetworkJob(Job):
    """A race over a network.

    Attributes:
        rates: of its links, one after the other, each for as many of the rounds; everything is
            built under the first.
    """

    rates: tuple[str, ...] = ()


class Exchange(Race):
    """A race that also counts what each node sends."""

    job: NetworkJob
    counted, warm = 0, 3  # torch's PowerSGD starts after two

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: dict[str, list[int]] = {entry.contender.name: [] for entry in self.entries}
        self.rate = self.job.rates[0]

    def prepare(self, entry: Entry) -> None:
        """Build and warm up."""
        torch.manual_seed(SEED)
        entry.step = entry.contender.build(self.case)
        for batch in self.batches[: self.warm]:
            with self.turn(entry):
                entry.run(batch)

    def time(self, entry: Entry, number: int) -> None:
        """Time one whole step from a common start, and count from before it to after it."""
        self.shape(number)
        batch = self.batches[self.warm + number]
        with self.turn(entry):
            dist.barrier(self.control)
            before = sent_bytes()
            dist.barrier(self.control)
            start = time.perf_counter()
            entry.run(batch)
            entry.seconds.append(time.perf_counter() - start)
            dist.barrier(self.control)
            self.sent[entry.contender.name].append(sent_bytes() - before)
            dist.barrier(self.control)

    def shape(self, number: int) -> None:
        """Give the links the rate of a round."""
        rate = self.job.rates[number * len(self.job.rates) // self.job.rounds]
        if rate != self.rate and os.environ["LOCAL_RANK"] == "0":
            shape_here(rate)
        self.rate = rate

    def turn(self, entry: Entry) -> AbstractContextManager[None]:
        """What surrounds a contender's turn: Horovod is not to run in those of others."""
        step = entry.step
        return step.turn(*self.batches[0]) if isinstance(step, Horovod) else nullcontext()

    def gather(self, entry: Entry) -> dict[str, Any]:
        """Return what all ranks know of a contender: slowest steps, most bytes."""
        result = super().gather(entry)
        if entry.error is None:
            sent = torch.tensor(self.sent[entry.contender.name])
            dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.control)
            result["sent"] = sent.tolist()
            if isinstance(entry.step, Way) and self.rank == 0:
                plan, each = entry.step.plan, int(os.environ["LOCAL_WORLD_SIZE"])
                result["planned_bytes"] = planned_bytes(self.case, plan, each)
                result["buckets"] = bucket_shares(plan)
        return result


def main() -> None:
    """Join the other ranks and run the job."""
    folder = Path(sys.argv[1])
    job = NetworkJob.load(folder)
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.patience))
    each = int(os.environ["LOCAL_WORLD_SIZE"])
    Exchange(job, folder, CASES[job.case], contenders(each)).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
