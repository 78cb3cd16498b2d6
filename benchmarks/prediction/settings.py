"""Settings of measurements: one host, or nodes of the emulated cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.measure import SIZES
from benchmarks.cluster import Network, RanksFailed, launch

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Setting:
    """Ranks and their links.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: ranks on each.
        rate: rate of the links between emulated nodes; None for one host without emulation.
    """

    nodes: int
    ranks_per_node: int
    rate: str | None = None

    def __post_init__(self) -> None:
        if self.rate is None and self.nodes != 1:
            raise ValueError("nodes without a rate: one host is one node")

    def __str__(self) -> str:
        if self.rate is None:
            return f"one host, {self.ranks_per_node} ranks"
        return f"{self.nodes}x{self.ranks_per_node} at {self.rate}"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    def run(
        self, module: str, *arguments: str, timeout_s: float | None = None, **environment: str
    ) -> None:
        """Run a Python module on every rank.

        Raises:
            benchmarks.cluster.Unavailable: nodes cannot be emulated here.
            benchmarks.cluster.RanksFailed: a rank failed, or time ran out.
        """
        if self.rate is not None:
            command = [sys.executable, "-m", module, *arguments]
            with Network(self.nodes, self.rate) as network:
                launch(
                    network,
                    command,
                    self.ranks_per_node,
                    environment=environment,
                    timeout_s=timeout_s,
                )
            return
        threads = str(max(1, (os.cpu_count() or 1) // self.ranks))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(self.ranks), "-m", module, *arguments]
        variables = {"OMP_NUM_THREADS": threads, **os.environ, **environment}
        try:
            subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=timeout_s)
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            raise RanksFailed(f"{self}: {error}") from error


def measure_cluster(
    setting: Setting,
    budget_s: float,
    *,
    sizes: Sequence[int] = SIZES,
    mesh: str | None = None,
) -> Cluster:
    """Return the cluster that `autopar measure` measures there, in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="prediction-") as folder:
        output = str(Path(folder, "cluster.json"))
        options = ["--no-cache", "--budget", str(budget_s), "--output", output]
        options += ["--sizes", ",".join(map(str, sizes)), *(["--mesh", mesh] if mesh else [])]
        setting.run("autopar", "measure", *options, timeout_s=10 * budget_s + 120)
        return Cluster.load(Path(output))
