"""`add_command`: subcommands with a description in plain words and an example."""

from __future__ import annotations

import argparse
import json
from typing import Any

JSON = "print JSON instead of text: seconds, bytes"
"""Help of --json."""


def add_command(
    commands: Any, name: str, what: str, example: str, more: str = "", usage: str | None = None
) -> argparse.ArgumentParser:
    """Adds a subcommand to a parser.

    Args:
        commands: the parser's subcommands.
        name: name of the subcommand.
        what: what it does, in one line for the list of commands.
        example: command lines to show, one a line.
        more: further sentences for its own help.
        usage: usage line; by default argparse makes it.
    """
    listed = "\n".join(f"  {line}" for line in example.splitlines())
    return commands.add_parser(
        name,
        help=what,
        usage=usage,
        description=f"{what[0].upper()}{what[1:]}. {more}".strip(),
        epilog=f"example:\n{listed}",
        formatter_class=_Help,
    )


def print_json(document: Any) -> None:
    """Prints a document as JSON."""
    print(json.dumps(document, indent=1))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the example, and wraps the description."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("example:"):
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)
