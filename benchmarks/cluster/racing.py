"""A race whose ranks run on the nodes of an emulated network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import Network
from benchmarks.cluster.ranks import start
from benchmarks.launch import Job, Notify, race


def race_over(
    network: Network,
    ranks_per_node: int,
    worker: str,
    job: Job,
    notify: Notify,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a job to its end and return the outcome, as `benchmarks.launch.race` does.

    Args:
        network: an entered network.
        ranks_per_node: processes on each node.
        worker: module of a rank; its argument is the job's folder.
        job: the race.
        notify: function that shows progress.
        environment: more variables for every rank.
    """

    def start_rank(job: Job, rank: int, folder: Path, port: int) -> subprocess.Popen[bytes]:
        variables = {
            "OMP_NUM_THREADS": str(job.threads),
            "MASTER_PORT": str(port),
            "PYTHONFAULTHANDLER": "1",
            **(environment or {}),
        }
        command, log = [sys.executable, "-m", worker, str(folder)], folder / f"log.{rank}"
        return start(network, command, rank, ranks_per_node, environment=variables, log=log)

    return race(job, notify, start_rank)
