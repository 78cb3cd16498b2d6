"""A race whose ranks stand on the nodes of an emulated network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster.network import Network
from benchmarks.cluster.ranks import start
from benchmarks.launch import Job, race


def race_over(
    network: Network,
    ranks_per_node: int,
    worker: str,
    job: Job,
    tell: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run a job to its end and return the outcome, as `benchmarks.launch.race` does.

    Args:
        network: that has been entered.
        ranks_per_node: processes on each node.
        worker: the module that is a rank; its argument is the job's folder.
        job: what to run.
        tell: is told what goes on.
        environment: more variables for every rank.
    """
    starting = partial(_start, network, ranks_per_node, worker, dict(environment or {}))
    return race(job, tell, starting)


def _start(
    network: Network,
    ranks_per_node: int,
    worker: str,
    given: Mapping[str, str],
    job: Job,
    rank: int,
    folder: Path,
    port: int,
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", worker, str(folder)]
    own = {"OMP_NUM_THREADS": str(job.threads), "MASTER_PORT": str(port), "PYTHONFAULTHANDLER": "1"}
    environment = {**own, **given}
    log = folder / f"log.{rank}"
    return start(network, command, rank, ranks_per_node, environment=environment, log=log)
