"""Scripts of the user: `load` calls make() of one, `launch` runs one as ranks through torchrun."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.commands.option_types import processes
from autopar.cost_model.host import Host
from autopar.errors import StrategyError


def load(script: str, arguments: Sequence[str] = ()) -> tuple[Any, Any]:
    """The model and example inputs of a script's make(), with its arguments in sys.argv."""
    saved, sys.argv = sys.argv, [script, *arguments]
    try:
        names = runpy.run_path(script, run_name="autopar_script")
        if "make" not in names:
            raise StrategyError(
                f"{script} has no make(). Define make() that returns (model, example inputs)."
            )
        made = names["make"]()
    finally:
        sys.argv = saved
    if not (isinstance(made, tuple) and len(made) == 2):
        raise StrategyError(f"make() in {script} returned {made!r:.60}, not (model, inputs)")
    return made


def add_script(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `launch`."""
    parser.add_argument("script", help="Python file")
    told = "number of processes: by default the GPUs of this host, or its cores without any"
    parser.add_argument("--nproc", type=processes, help=told)


def default_processes() -> int:
    """The number of GPUs of this host, or of the cores for this process without any."""
    return torch.cuda.device_count() or Host.here().cores


def launch(
    script: str,
    nproc: int | None,
    rest: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs a script as `nproc` ranks that divide the cores; returns the exit status.

    `nproc` is None for one a GPU, or a core. The script "-m" runs the module at the start of
    `rest`; `environment` is added to this one's.
    """
    nproc = nproc or default_processes()
    threads = max(1, Host.here().cores // nproc)
    variables = {"OMP_NUM_THREADS": str(threads), **os.environ, **(environment or {})}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), script, *rest]
    return subprocess.run(command, env=variables, check=False).returncode
