"""Launches scripts on processes of this machine, through torchrun."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from autopar.commands.option_types import processes


def add_script(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `launch`."""
    parser.add_argument("script", help="Python file")
    parser.add_argument(
        "--nproc", type=processes, default=os.cpu_count() or 1, help="number of processes"
    )


def launch(
    script: str, nproc: int, rest: Sequence[str], environment: Mapping[str, str] | None = None
) -> int:
    """Runs a script as `nproc` ranks that divide the cores; returns the exit status.

    Args:
        script: path of the script, or "-m" to run the module at the start of `rest`.
        nproc: number of ranks.
        rest: arguments of the script.
        environment: extra environment variables.
    """
    threads = max(1, (os.cpu_count() or 1) // nproc)
    variables = {"OMP_NUM_THREADS": str(threads), **os.environ, **(environment or {})}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), script, *rest]
    return subprocess.run(command, env=variables, check=False).returncode
