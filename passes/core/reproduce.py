"""Runs the passes of a reproducer again: `python -m autopar.passes.core.reproduce FILE`.

Exit status: 0 if all passes run, 1 if one fails, 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from autopar.errors import PassError
from autopar.passes.core.pass_base import pass_name
from autopar.passes.core.reproducer import load
from autopar.passes.core.runner import apply_pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the passes of a reproducer, and prints the error of the first that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m autopar.passes.core.reproduce",
        description="Run the passes that failed again, on the graph that they failed on.",
    )
    parser.add_argument("file", help="the file that the PassError names")
    parser.add_argument("--graph", action="store_true", help="print the graph before the passes")
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module, or the path of a file, that defines passes of your own",
    )
    options = parser.parse_args(arguments)
    try:
        import_module("autopar.passes.pipeline")
        defined = [_run_or_import(module) for module in options.modules]  # keeps classes alive
        reproducer = load(options.file)
    except (ImportError, OSError, PassError) as error:
        parser.error(str(error))
    del defined
    graph = reproducer.graph
    if options.graph:
        print(graph)
    for item in reproducer.pipeline:
        try:
            graph = apply_pass(item, graph)
        except Exception:
            traceback.print_exc()
            print(f"{pass_name(item)} fails again", file=sys.stderr)
            return 1
    print(f"no failure: {', '.join(reproducer.pipeline.names)}")
    return 0


def _run_or_import(module: str) -> object:
    if module.endswith(".py"):
        return runpy.run_path(module, run_name="autopar_script")
    return import_module(module)


if __name__ == "__main__":
    sys.exit(main())
