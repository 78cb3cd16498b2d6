"""`autopar completion`: a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from autopar.cli.help_text import add_command
from autopar.errors import StrategyError

SHELLS = ("bash", "zsh")


def add_to(commands: Any, parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Adds the command to the subcommands of a parser, which `parser` makes again."""
    own = add_command(
        commands,
        "completion",
        "print a script for completion of commands and options in your shell",
        "autopar completion bash > ~/.local/share/bash-completion/completions/autopar",
        "Needs shtab: pip install shtab.",
    )
    own.add_argument("shell", choices=SHELLS)
    own.set_defaults(command=lambda options: print(script(parser(), options.shell)))


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script of a shell, one of `SHELLS`."""
    try:
        import shtab
    except ImportError:
        raise StrategyError("completion needs shtab: pip install shtab") from None
    return shtab.complete(parser, shell)
