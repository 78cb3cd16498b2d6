"""One rank of a race over an emulated network; its one argument is the job's folder."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.network import sent_bytes
from benchmarks.communication.contenders import CASES, contenders, planned_bytes
from benchmarks.contenders import PlannedStep
from benchmarks.launch import Job
from benchmarks.worker import SEED, Entry, Race


class CommunicationRace(Race):
    """A race that also counts the bytes that each node sends."""

    counted, warm = 0, 3  # torch's PowerSGD starts after two

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent: dict[str, list[int]] = {entry.contender.name: [] for entry in self.entries}

    def prepare(self, entry: Entry) -> None:
        """Build and warm up."""
        torch.manual_seed(SEED)
        entry.step = entry.contender.build(self.case)
        for batch in self.batches[: self.warm]:
            entry.run(batch)

    def time(self, entry: Entry, number: int) -> None:
        """Time one whole step from a common start, and count bytes around it."""
        dist.barrier(self.control)
        before = sent_bytes()
        dist.barrier(self.control)
        start = time.perf_counter()
        entry.run(self.batches[self.warm + number])
        entry.seconds.append(time.perf_counter() - start)
        dist.barrier(self.control)
        self.sent[entry.contender.name].append(sent_bytes() - before)
        dist.barrier(self.control)

    def gather(self, entry: Entry) -> dict[str, Any]:
        """Return figures over all ranks: slowest steps, most bytes."""
        result = super().gather(entry)
        if entry.error is None:
            sent = torch.tensor(self.sent[entry.contender.name])
            dist.all_reduce(sent, dist.ReduceOp.MAX, group=self.control)
            result["sent"] = sent.tolist()
            if isinstance(entry.step, PlannedStep) and self.rank == 0:
                ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
                result["planned_bytes"] = planned_bytes(self.case, entry.step.plan, ranks_per_node)
        return result


def main() -> None:
    """Join the other ranks and run the job."""
    folder = Path(sys.argv[1])
    job = Job.load(folder)
    torch.set_num_threads(job.threads)
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.patience))
    field = contenders(int(os.environ["LOCAL_WORLD_SIZE"]))
    CommunicationRace(job, folder, CASES[job.case], field).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
