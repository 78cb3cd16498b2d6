"""`autopar verify`: compares training on several processes with the plain model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from autopar._torch import pytree
from autopar.api import verify
from autopar.capture.model_info import default_device, device_of
from autopar.cli.help_text import JSON, add_command
from autopar.cli.plan import add_strategy, strategy_of
from autopar.cli.script import add_script, default_processes, has_make, launch, load
from autopar.core.common.world import rank
from autopar.core.environment import PLAIN, VERIFY, asks_for_plain, is_verified
from autopar.errors import FallbackWarning, StrategyError
from autopar.runtime.agreement.consensus import broadcast_from_rank0
from autopar.runtime.start import ensure_process_group
from autopar.train.verification.script_record import Summary, record_script
from autopar.train.verification.script_runs import compare_runs, folder_of
from autopar.train.verification.verify import print_verdict

TIMEOUT_S = 300.0
"""Timeout of a collective, in seconds."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "verify",
        "train on several processes and on one, and compare every gradient and parameter",
        "autopar verify gpt.py --nproc 2 --strategy zero3",
        "A SCRIPT with make() -> (model, example inputs), as for autopar plan: rank 0's inputs are "
        "the global batch. Any other SCRIPT runs as it is, twice, until its optimizers have made "
        "the steps: with its compiled models, and with the plain ones. autopar.Checkpointer saves "
        "nothing meanwhile. Exit status: 0 PASS, 1 FAIL, 2 an error.",
        usage="autopar verify SCRIPT [--nproc N] [--steps N] [OPTIONS]\n"
        "                      [-- ARGUMENTS OF THE SCRIPT]",
    )
    add_script(parser)
    add = parser.add_argument
    add("--steps", type=int, default=3, help="number of training steps")
    add_strategy(parser, "auto")
    add("--memory", help="memory cap of a rank, such as 24GiB")
    add("--json", action="store_true", help=JSON)
    add("--loop", action="store_true", help="run the script itself, though it has make()")
    add("--tolerance", type=float, help="relative difference that passes (default: by dtype)")
    add("--as-is", action="store_true", help="use the model's dtypes instead of float64")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """`autopar verify`; under torchrun, one of its ranks."""
    if options.steps < 1:
        raise StrategyError(f"--steps {options.steps}: at least one")
    if is_verified():
        return run_rank(Path(os.environ[VERIFY]))
    options.loop = options.loop or not has_make(options.script)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as name:
        folder = Path(name)
        values = {key: value for key, value in vars(options).items() if key != "command"}
        (folder / "options").write_text(json.dumps(values))
        return (verify_loop if options.loop else verify_make)(options, folder)


def verify_make(options: argparse.Namespace, folder: Path) -> int:
    """Compares the model of a script's make(); the ranks print the verdict."""
    launch("-m", options.nproc, _rank_command(options), {VERIFY: str(folder)})
    verdict = folder / "verdict"
    if options.json and verdict.exists():
        print((folder / "result").read_text())
    if not verdict.exists():  # the ranks have printed an error
        return 2
    return 0 if verdict.read_text() == "PASS" else 1


def verify_loop(options: argparse.Namespace, folder: Path) -> int:
    """Runs a script with its compiled models and with the plain ones, and prints the verdict.

    The plain models run on one process. Under batch="local" there is no script of one process with
    the rows of all, so they run under DistributedDataParallel.
    """
    named = [f"--{name.replace('_', '-')}" for name in _OF_MAKE if getattr(options, name)]
    if named or options.strategy != "auto":
        raise StrategyError(
            f"{options.script} runs as it is, so {named[0] if named else '--strategy'} has no "
            "effect: its own call of autopar.compile says how it trains. Leave the option out."
        )
    command, nproc = _rank_command(options), options.nproc or default_processes()
    compiled, plain = (folder / name for name in RUNS)
    status = launch("-m", nproc, command, {VERIFY: str(folder)})
    if status or not folder_of(compiled, 0).exists():
        return 2
    summary = Summary.load(folder_of(compiled, 0))
    if not summary.steps:
        raise StrategyError(
            f"{options.script} made no optimizer step, and it has no make(): there is nothing to "
            "compare. A script that resumes a finished run has no step left: give it an empty "
            "checkpoint folder."
        )
    if not summary.batches:
        raise StrategyError(
            f"{options.script} made {summary.steps} optimizer steps, none of them of a model from "
            "autopar.compile, and it has no make(): there is nothing to compare"
        )
    alone = "local" not in summary.batches
    variables = {VERIFY: str(folder), PLAIN: "1"}
    if launch("-m", 1 if alone else nproc, command, variables):
        return 2
    result = compare_runs(compiled, plain, options.tolerance)
    if options.json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        print_verdict(result)
    return 0 if result.passed else 1


RUNS = "compiled", "plain"
"""Folders of the two runs of a script."""

_OF_MAKE = (
    "tp", "cp", "ep", "pp", "micro_batches", "schedule", "search", "zero", "pin", "split_points",
    "compress", "memory", "as_is",
)  # fmt: skip
"""Options that a script without make() does not take."""


def _rank_command(options: argparse.Namespace) -> list[str]:
    return ["autopar", "verify", options.script]


def run_rank(folder: Path) -> int:
    """Runs one rank; rank 0 prints and writes the verdict."""
    options = argparse.Namespace(**json.loads((folder / "options").read_text()))
    if options.loop:
        if asks_for_plain():  # this command does, not the user
            warnings.simplefilter("ignore", FallbackWarning)
        return record_rank(options, folder / RUNS[asks_for_plain()])
    if (device := default_device()).type == "cuda":
        torch.cuda.set_device(device)  # of a make() that says "cuda"
    model, inputs = load(options.script, options.rest)
    device = device_of(model)
    ensure_process_group(device, None, TIMEOUT_S)
    on_cpu = broadcast_from_rank0(lambda: tensors_to("cpu", inputs))  # pickles keep the GPU
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        result = verify(
            model,
            example_inputs=tensors_to(device, on_cpu),
            steps=options.steps,
            double=not options.as_is,
            tolerance=options.tolerance,
            strategy=strategy_of(options),
            memory=options.memory,
        )
    if rank() == 0:
        (folder / "result").write_text(json.dumps(result.to_dict(), indent=1))
        (folder / "verdict").write_text("PASS" if result.passed else "FAIL")
    return 0


def record_rank(options: argparse.Namespace, run: Path) -> int:
    """Runs a script as one rank, and writes the record of its steps."""
    run.mkdir(exist_ok=True)
    folder = folder_of(run, int(os.environ.get("RANK", "0")))
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        record_script(options.script, options.rest, options.steps, folder)
    return 0


def tensors_to(device: torch.device | str, values: Any) -> Any:
    """Example inputs with their tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)
