"""`autopar verify`: compares training on several processes with the plain model."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from autopar._torch import pytree
from autopar.api import verify
from autopar.capture.model_info import default_device, device_of
from autopar.commands.help_text import JSON, add_command
from autopar.commands.plan import add_strategy, strategy_of
from autopar.commands.script import add_script, launch, load
from autopar.common.world import rank
from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import broadcast_from_rank0
from autopar.runtime.start import ensure_process_group

FOLDER = "AUTOPAR_VERIFY"
"""Environment variable: folder of the ranks' options and of rank 0's verdict."""

TIMEOUT_S = 300.0
"""Timeout of a collective, in seconds."""


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = add_command(
        commands,
        "verify",
        "train on several processes and on one, and compare every gradient and parameter",
        "autopar verify gpt.py --nproc 2 --strategy zero3",
        "SCRIPT has make() -> (model, example inputs), as for autopar plan; rank 0's inputs are "
        "the global batch. Exit status: 0 PASS, 1 FAIL, 2 an error.",
        usage="autopar verify SCRIPT [--nproc N] [--steps N] [OPTIONS]\n"
        "                      [-- ARGUMENTS OF THE SCRIPT]",
    )
    add_script(parser)
    add = parser.add_argument
    add("--steps", type=int, default=3, help="number of training steps")
    add_strategy(parser, "auto")
    add("--memory", help="memory cap of a rank, such as 24GiB")
    add("--json", action="store_true", help=JSON)
    add("--as-is", action="store_true", help="use the model's dtypes instead of float64")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """`autopar verify`; under torchrun, one of its ranks."""
    if options.steps < 1:
        raise StrategyError(f"--steps {options.steps}: at least one")
    if FOLDER in os.environ:
        return run_rank(Path(os.environ[FOLDER]))
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as name:
        folder = Path(name)
        values = {key: value for key, value in vars(options).items() if key != "command"}
        (folder / "options").write_text(json.dumps(values))
        launch("-m", options.nproc, ["autopar", "verify", options.script], {FOLDER: name})
        verdict = folder / "verdict"
        if options.json and verdict.exists():
            print((folder / "result").read_text())
        if not verdict.exists():  # the ranks have printed an error
            return 2
        return 0 if verdict.read_text() == "PASS" else 1


def run_rank(folder: Path) -> int:
    """Runs one rank; rank 0 prints and writes the verdict."""
    options = argparse.Namespace(**json.loads((folder / "options").read_text()))
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
            strategy=strategy_of(options),
            memory=options.memory,
        )
    if rank() == 0:
        (folder / "result").write_text(json.dumps(result.to_dict(), indent=1))
        (folder / "verdict").write_text("PASS" if result.passed else "FAIL")
    return 0


def tensors_to(device: torch.device | str, values: Any) -> Any:
    """Example inputs with their tensors on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)
