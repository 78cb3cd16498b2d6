"""`autopar run`: starts a training script as ranks, and again after a failure."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from autopar.cli.help_text import add_command
from autopar.cli.option_types import endpoint, limit_s, nodes, restarts, whole_seconds
from autopar.cli.script import add_script, launch
from autopar.errors import StrategyError


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "run",
        "start a training script as ranks of one or several machines, and again after a failure",
        "autopar run train.py --nproc 8 --max-restarts 3 --log-dir logs -- --epochs 3\n"
        "autopar run train.py --nnodes 1:4 --endpoint head:29400 --max-restarts 3",
        "Each process is one rank, as under torchrun. On several machines give each the same "
        "command. Exit status: 0 done; 143 or 130 told to stop, start again to go on; 75 too few "
        "machines; 2 a wrong command; otherwise that of the first rank that failed.",
        usage="autopar run SCRIPT [--nproc N] [--nnodes MIN:MAX --endpoint HOST:PORT]\n"
        "                   [--max-restarts N] [--log-dir DIR] [-- ARGUMENTS]",
    )
    add_script(parser)
    add = parser.add_argument
    add("--max-restarts", type=restarts, default=0, help="failures after which to start again")
    add("--log-dir", type=Path, metavar="DIR", help="files of each rank; shows rank 0's alone")
    add("--nnodes", type=nodes, default=(1, 1), metavar="MIN:MAX", help="number of machines")
    told = "where machines meet: one of them, on a private network"
    add("--endpoint", type=endpoint, metavar="HOST:PORT", help=told)
    told = "name of this run, the same on all machines (default: made from the command)"
    add("--run-id", default="", help=told)
    told = "seconds to save in after SIGTERM (default: %(default)g)"
    add("--grace", type=limit_s, default=120.0, metavar="S", help=told)
    told = "seconds to wait for enough machines (default: %(default)d)"
    add("--join", type=whole_seconds, default=600, metavar="S", help=told)
    told = "seconds after which a silent machine counts as gone (default: %(default)d)"
    add("--silence", type=whole_seconds, default=5, metavar="S", help=told)
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if options.nnodes[1] > 1 and not options.endpoint:
        raise StrategyError("--nnodes needs --endpoint HOST:PORT: one of the machines, a free port")
    return launch(
        options.script,
        options.nproc,
        options.rest,
        nodes=options.nnodes,
        endpoint=options.endpoint or "",
        run_id=options.run_id,
        max_restarts=options.max_restarts,
        log_dir=options.log_dir,
        grace_s=options.grace,
        join_s=options.join,
        silence_s=options.silence,
    )
