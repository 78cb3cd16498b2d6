"""Python files with `make()`, which returns the model to plan and its inputs."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from typing import Any

from autopar.errors import StrategyError


def load(script: str, arguments: Sequence[str] = ()) -> tuple[Any, Any]:
    """The model and example inputs of a script's make().

    Args:
        script: path of the file.
        arguments: the script's arguments, in sys.argv.
    """
    saved, sys.argv = sys.argv, [script, *arguments]
    try:
        return _made(script)
    finally:
        sys.argv = saved


def _made(script: str) -> tuple[Any, Any]:
    names = runpy.run_path(script, run_name="autopar_script")
    if "make" not in names:
        raise StrategyError(
            f"{script} has no make(). Define make() that returns (model, example inputs)."
        )
    made = names["make"]()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise StrategyError(f"make() in {script} returned {made!r:.60}, not (model, inputs)")
    return made
