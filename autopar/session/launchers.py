"""`adopt_launcher`: the place of a process that Slurm or MPI started, in torch's variables."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import StrategyError

PORTS = range(20_000, 32_768)
"""Ports of a meeting point: above those of services, below those that Linux hands out."""


@dataclass(frozen=True)
class Launcher:
    """Names of the variables by which a launcher tells a process its place.

    Attributes:
        job: values that tell a run from others on the same host; all ranks have the same ones.
        nodes: list of the nodes' names, "" where there is none.
        local_ranks: number of ranks on this node, "" where `nodes` tells more.
    """

    name: str
    rank: str
    ranks: str
    local_rank: str
    job: tuple[str, ...]
    nodes: str = ""
    local_ranks: str = ""

    def started(self, variables: Mapping[str, str]) -> bool:
        """Whether this launcher started a process with these variables."""
        return {self.rank, self.ranks, self.local_rank} <= variables.keys()

    def address(self, variables: Mapping[str, str]) -> str:
        """Name or address of the node of rank 0."""
        if self.nodes:
            return first_node(variables[self.nodes])
        if variables[self.ranks] == variables.get(self.local_ranks):
            return "127.0.0.1"
        raise StrategyError(
            f"{self.name} started {variables[self.ranks]} ranks on several nodes, and does not say "
            "where rank 0 is: set MASTER_ADDR to that host on all ranks, by "
            "`mpirun -x MASTER_ADDR=HOST` or `mpiexec -genv MASTER_ADDR HOST`"
        )

    def port(self, variables: Mapping[str, str]) -> int:
        """A port for the store of rank 0, the same on all ranks of a job."""
        # MPICH has no variable for a job. Its ranks on a node have one parent.
        job = [variables.get(name, "") for name in self.job] or [str(os.getppid())]
        return PORTS[int(hashlib.sha256(".".join(job).encode()).hexdigest(), 16) % len(PORTS)]


# MPI comes first, since mpirun inside of a Slurm job starts its ranks by a step of srun. A batch
# script has no SLURM_STEP_*, so that python without srun stays one process.
LAUNCHERS = (
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        job=("OMPI_MCA_ess_base_jobid",),
        local_ranks="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", job=(), local_ranks="MPI_LOCALNRANKS"
    ),
    Launcher(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        nodes="SLURM_STEP_NODELIST",
    ),
)
"""Launchers whose ranks need no torchrun."""


def adopt_launcher() -> None:
    """Sets torch's variables from those of Slurm or MPI, unless torchrun has set them.

    Raises:
        StrategyError: the ranks are on several nodes, and none is known to have rank 0.
    """
    if "RANK" in os.environ:
        return
    launcher = next((each for each in LAUNCHERS if each.started(os.environ)), None)
    if launcher is None or os.environ[launcher.ranks] == "1":
        return
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = launcher.address(os.environ)
    os.environ.setdefault("MASTER_PORT", str(launcher.port(os.environ)))
    os.environ.setdefault("LOCAL_RANK", os.environ[launcher.local_rank])
    os.environ["WORLD_SIZE"] = os.environ[launcher.ranks]
    os.environ["RANK"] = os.environ[launcher.rank]
    if os.environ["RANK"] == "0":
        text = f"autopar: {launcher.name} started {os.environ['WORLD_SIZE']} ranks"
        print(text, file=sys.stderr, flush=True)


def first_node(nodes: str) -> str:
    """The first name of a list of Slurm's, such as gpu003 of "gpu[003-007,012],login1"."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).partition(",")[0]
