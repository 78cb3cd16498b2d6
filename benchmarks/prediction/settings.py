"""Settings of measurements: one host, or nodes of the emulated cluster."""

from __future__ import annotations

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


def measure_cluster(
    setting: Setting,
    budget_s: float,
    *,
    sizes: Sequence[int] = SIZES,
    mesh: str | None = None,
) -> Cluster:
    """Return the cluster that `autopar measure` measures there, in processes of its own.

    Raises:
        benchmarks.cluster.Unavailable: nodes cannot be emulated here.
        benchmarks.cluster.RanksFailed: a rank failed, or time ran out.
    """
    timeout_s = 10 * budget_s + 120
    with tempfile.TemporaryDirectory(prefix="prediction-") as folder:
        output = Path(folder, "cluster.json")
        command = [sys.executable, "-m", "autopar", "measure", "--no-cache"]
        command += ["--budget", str(budget_s), "--output", str(output)]
        command += ["--sizes", ",".join(map(str, sizes)), *(["--mesh", mesh] if mesh else [])]
        if setting.rate is not None:
            with Network(setting.nodes, setting.rate) as network:
                logs, ranks = Path(folder), setting.ranks_per_node
                launch(network, command, ranks, logs=logs, timeout_s=timeout_s)
        else:
            command += ["--nproc", str(setting.ranks_per_node)]
            _run_here(setting, command, timeout_s)
        return Cluster.load(output)


def _run_here(setting: Setting, command: Sequence[str], timeout_s: float) -> None:
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": timeout_s}
    try:
        ended = subprocess.run(command, **options)
    except subprocess.TimeoutExpired as error:
        raise RanksFailed(f"{setting}: still busy after {timeout_s:g} s") from error
    if ended.returncode:
        raise RanksFailed(f"{setting}: {ended.stderr.strip()[-2000:]}")
