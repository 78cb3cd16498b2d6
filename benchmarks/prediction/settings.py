"""Where collectives are measured: one host, or nodes of the emulated cluster."""

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
    """Ranks and what joins them.

    Attributes:
        nodes: their number.
        ranks_per_node: ranks on each.
        rate: of the links between emulated nodes; None for one host, with nothing emulated.
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
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node


def measured(
    setting: Setting,
    budget_s: float,
    *,
    sizes: Sequence[int] = SIZES,
    mesh: str | None = None,
) -> Cluster:
    """The cluster that `autopar measure` makes there, in processes of its own.

    Raises:
        benchmarks.cluster.Unavailable: nodes cannot be emulated here.
        benchmarks.cluster.RanksFailed: it did not work.
    """
    with tempfile.TemporaryDirectory(prefix="prediction-") as folder:
        output = Path(folder, "cluster.json")
        command = [sys.executable, "-m", "autopar", "measure", "--no-cache"]
        command += ["--budget", str(budget_s), "--output", str(output)]
        command += ["--sizes", ",".join(map(str, sizes))]
        command += ["--mesh", mesh] if mesh else []
        run(setting, command, Path(folder), timeout_s=10 * budget_s + 120)
        return Cluster.load(output)


def run(setting: Setting, command: Sequence[str], logs: Path, timeout_s: float) -> None:
    """`autopar measure` among the ranks of a setting."""
    if setting.rate is not None:
        with Network(setting.nodes, setting.rate) as network:
            launch(network, command, setting.ranks_per_node, logs=logs, timeout_s=timeout_s)
        return
    nproc = ["--nproc", str(setting.ranks_per_node)]
    try:
        done = subprocess.run(
            [*command, *nproc], cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise RanksFailed(f"{setting}: still busy after {timeout_s:g} s") from error
    if done.returncode:
        raise RanksFailed(f"{setting}: {done.stderr.strip()[-2000:]}")
