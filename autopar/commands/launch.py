"""Scripts launched on several processes of this machine, through torchrun."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from autopar.commands.option_types import processes


def add_script(parser: argparse.ArgumentParser) -> None:
    """The arguments that name what `launch` launches."""
    parser.add_argument("script")
    parser.add_argument(
        "--nproc", type=processes, default=os.cpu_count() or 1, help="number of processes"
    )


def launch(
    script: str, nproc: int, rest: Sequence[str], environment: Mapping[str, str] | None = None
) -> int:
    """Runs a script as `nproc` ranks that share out the cores; returns the exit status.

    Args:
        script: its path, or "-m" to run the module that `rest` begins with.
        nproc: number of ranks.
        rest: the script's arguments.
        environment: variables for it.
    """
    threads = max(1, (os.cpu_count() or 1) // nproc)
    variables = {"OMP_NUM_THREADS": str(threads), **os.environ, **(environment or {})}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), script, *rest]
    return subprocess.run(command, env=variables, check=False).returncode
