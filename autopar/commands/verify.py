"""`autopar verify`: steps of a script's model on some processes, beside the plain model."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from autopar.api import verify
from autopar.commands.launch import add_script, launch
from autopar.commands.plan import add_strategy, strategy_of
from autopar.commands.script import load
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import broadcast_from_rank0
from autopar.runtime.process_groups import ensure_process_group, rank

FOLDER = "AUTOPAR_VERIFY"
"""Environment variable: the folder where ranks find their options and rank 0 leaves its verdict."""

TIMEOUT_S = 300.0
"""Seconds after which a collective fails."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "verify",
        help="train on several processes and beside the plain model, and compare",
        usage="autopar verify SCRIPT [--nproc N] [--steps N] [OPTIONS] "
        "[-- ARGUMENTS OF THE SCRIPT]",
        description="Trains the model for some steps on processes of this machine and, as it is, "
        "on one; compares the loss, every gradient, parameter and buffer. SCRIPT has make() -> "
        "(model, example inputs), as for autopar plan; rank 0's inputs are the global batch. "
        "Exit status: 0 PASS, 1 FAIL, 2 an error.",
    )
    add_script(parser)
    add = parser.add_argument
    add("--steps", type=int, default=3, help="number of training steps")
    add_strategy(parser, "auto")
    add("--memory", help="cap per rank, such as 24GiB")
    add("--as-is", action="store_true", help="in the model's own dtypes instead of float64")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """`autopar verify`; inside torchrun one rank of it."""
    if options.steps < 1:
        raise StrategyError(f"--steps {options.steps}: at least one")
    if FOLDER in os.environ:
        return run_rank(Path(os.environ[FOLDER]))
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as name:
        folder = Path(name)
        given = {key: value for key, value in vars(options).items() if key != "command"}
        (folder / "options").write_text(json.dumps(given))
        launch("-m", options.nproc, ["autopar", "verify", options.script], {FOLDER: name})
        verdict = folder / "verdict"
        if not verdict.exists():  # an error, which the ranks have printed
            return 2
        return 0 if verdict.read_text() == "PASS" else 1


def run_rank(folder: Path) -> int:
    """The work of one rank; rank 0 prints and keeps the verdict."""
    options = argparse.Namespace(**json.loads((folder / "options").read_text()))
    model, inputs = load(options.script, options.rest)
    ensure_process_group(None, TIMEOUT_S)
    result = verify(
        model,
        example_inputs=broadcast_from_rank0(lambda: inputs),
        steps=options.steps,
        double=not options.as_is,
        strategy=strategy_of(options),
        memory=options.memory,
    )
    if rank() == 0:
        (folder / "verdict").write_text("PASS" if result.passed else "FAIL")
    return 0
