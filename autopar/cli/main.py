"""The command line: `autopar plan | show | diff | run | verify | profile | measure | ...`."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from rich.table import Table

from autopar import __version__
from autopar.cli import (
    collectives,
    completion,
    import_nccl_tests,
    measure,
    plan,
    profile,
    run,
    scale,
    show,
    verify,
)
from autopar.cli.help_text import JSON, add_command, print_json
from autopar.cli.plain_console import PlainConsole
from autopar.core.plan.plan import Plan
from autopar.errors import AutoparError, OutOfMemoryError
from autopar.formatting import duration, human_bytes, printable
from autopar.report.diff import diff_lines

NOTHING_FITS = 3
"""Exit status if no plan fits under the memory cap; other errors have 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    try:
        options, unknown = parser().parse_known_args(words[:end])
        if unknown:
            also = ""
            if words[0] in ("run", "plan", "verify", "profile") and end == len(words):
                also = f"; arguments of the script stand behind --: -- {' '.join(unknown)}"
            parser().error(f"unrecognized arguments: {' '.join(unknown)}{also}")
    except SystemExit as stop:  # argparse has printed the error
        return int(stop.code or 0)
    options.rest = words[end + 1 :]
    try:
        return int(options.command(options) or 0)
    except OutOfMemoryError as error:
        console = _tell(error)
        if error.changes:
            console.print(*_memory_tables(error), markup=False, sep="\n")
        return NOTHING_FITS
    except (AutoparError, OSError) as error:
        _tell(error)
        return 2


def _tell(error: Exception) -> PlainConsole:
    """Prints an error to stderr, red on a terminal."""
    console = PlainConsole(stderr=True)
    console.print("autopar: ", style="red", end="")
    console.print(str(error), highlight=False, soft_wrap=True)
    return console


def _memory_tables(error: OutOfMemoryError) -> Iterator[Table]:
    """Memory of the smallest plan by category, and the changes with which a plan fits."""
    total = sum(error.memory.values())
    needs = Table("", title="Peak memory of the smallest plan", title_justify="left")
    needs.add_column("bytes", justify="right")
    for name, size in sorted(error.memory.items(), key=lambda part: -part[1]):
        if size:
            needs.add_row(name, f"{human_bytes(size)} ({size / total:.0%})")
    needs.add_row("missing", f"{human_bytes(error.shortfall)} ({error.shortfall})")
    yield needs
    title = "Changes that would help, each planned again"
    helps = Table("change", "give", title=title, title_justify="left")
    for name in ("a step takes", "a rank needs"):
        helps.add_column(name, justify="right")
    for change in error.changes:
        step = duration(change.step_s)
        helps.add_row(change.what, change.how, step, human_bytes(change.needed_bytes))
    yield helps


class _Parser(argparse.ArgumentParser):
    """A parser with errors that are safe to print."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = _Parser(prog="autopar", description="Trains an ordinary PyTorch model on many devices.")
    top.add_argument("--version", action="version", version=_version())
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    plan.add_to(commands)
    scale.add_to(commands)
    show.add_to(commands)

    diff = add_command(
        commands,
        "diff",
        "list the differences between two plans",
        "autopar diff plan.json other.json",
        "Exit status: 0 the same, 1 different, 2 an error.",
    )
    diff.add_argument("first", help="JSON file of a plan")
    diff.add_argument("second", help="JSON file of a plan")
    diff.add_argument("--json", action="store_true", help=JSON)
    diff.set_defaults(command=_run_diff)

    run.add_to(commands)
    verify.add_to(commands)
    profile.add_to(commands)
    measure.add_to(commands)
    collectives.add_to(commands)
    import_nccl_tests.add_to(commands)
    completion.add_to(commands, parser)
    return top


def _run_diff(options: argparse.Namespace) -> int:
    """Exit status 1 if the plans differ, as of diff."""
    first, second = Plan.load(options.first), Plan.load(options.second)
    if options.json:
        changes = dict(line.split(": ", 1) for line in diff_lines(first, second))
        print_json({"same": not changes, "changes": changes})
        return 1 if changes else 0
    text = first.diff(second)
    print(text or "the plans are the same")
    return 1 if text else 0


def _version() -> str:
    """Versions of autopar, torch and Python."""
    return f"autopar {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
