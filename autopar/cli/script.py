"""Scripts of the user: `load` calls make() of one, `launch` runs one as ranks."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autopar.cli.option_types import processes
from autopar.cost_model.host import Host
from autopar.errors import StrategyError
from autopar.train.elastic.run import Launch, run

MAKE = "script.py, or package.module, with make() -> (model, inputs); :NAME for another function"
"""Help of the argument that `load` reads."""

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(?<!\.py)")


def load(script: str, arguments: Sequence[str] = ()) -> tuple[Any, Any]:
    """The model and example inputs of a script's make(), with its arguments in sys.argv.

    Args:
        script: "make.py", "make.py:function", "package.module" or "package.module:function".
        arguments: arguments of the script.

    Raises:
        StrategyError: there is no such function, or it returns something else.
    """
    source, function = _parts(script)
    saved, sys.argv = sys.argv, [source, *arguments]
    try:
        made = _function(source, function)()
    finally:
        sys.argv = saved
    if not (isinstance(made, tuple) and len(made) == 2):
        kinds = [type(x).__name__ for x in made] if isinstance(made, tuple) else []
        shown = f"({', '.join(kinds)})" if kinds else f"a {type(made).__name__}"
        raise StrategyError(
            f"{function}() in {source} returns {shown}: return (model, inputs), with the arguments "
            "of a call as a tuple, or a dict by name"
        )
    return made


def has_make(script: str) -> bool:
    """Whether a script has the function that `load` calls, by its source.

    A module counts as one that has it, and so does a file that imports `*` from a module elsewhere.
    """
    source, _ = _parts(script)
    if source != script or not os.path.isfile(source):
        return True
    return bool(_names_of(Path(source), visited=set()) & {"make", "*"})


def _names_of(file: Path, visited: set[Path]) -> set[str]:
    """Names that the statements of a file define or import; "*" for those of files elsewhere."""
    names = set[str]()
    visited.add(file)
    for statement in ast.parse(file.read_bytes(), str(file)).body:
        match statement:
            case ast.ImportFrom(module=str(name), names=[ast.alias(name="*")]):
                beside = file.parent / f"{name.replace('.', '/')}.py"
                if not beside.is_file():
                    names.add("*")
                elif beside not in visited:
                    names |= _names_of(beside, visited)
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _parts(script: str) -> tuple[str, str]:
    """File or module, and the function's name."""
    source, colon, function = script.rpartition(":")
    return (source, function) if colon and function.isidentifier() else (script, "make")


def _function(source: str, name: str) -> Callable[[], Any]:
    """A function of a file or module, which may import what lies beside it."""
    is_module = not os.path.isfile(source) and _MODULE.fullmatch(source) is not None
    folder = os.getcwd() if is_module else os.path.dirname(os.path.abspath(source))
    if folder not in sys.path:
        sys.path.insert(0, folder)  # kept: forward() may import, too
    if is_module:
        names = vars(_module(source))
    else:
        names = runpy.run_path(source, run_name="autopar_script")
    if name not in names:
        raise StrategyError(
            f"{source} has no {name}(). Define {name}() that returns (model, example inputs)."
        )
    return names[name]


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise
        raise StrategyError(
            f"there is neither a file nor a module {name!r}. Give make.py, or package.module:make."
        ) from None


def add_script(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `launch`."""
    parser.add_argument("script", help="Python file")
    told = "number of processes: by default the GPUs of this host, or its cores without any"
    parser.add_argument("--nproc", type=processes, help=told)


def default_processes() -> int:
    """The number of GPUs of this host, or of the cores for this process without any."""
    return torch.cuda.device_count() or Host.here().cores


def threads_per_rank(nproc: int) -> dict[str, str]:
    """Variables with which `nproc` ranks divide the cores, unless the user has set them."""
    threads = str(max(1, Host.here().cores // nproc))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}


def launch(
    script: str,
    nproc: int | None,
    rest: Sequence[str],
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> int:
    """Runs a script as `nproc` ranks that divide the cores; returns the exit status.

    `nproc` is None for one a GPU, or a core. The script "-m" runs the module at the start of
    `rest`; `environment` is added to this one's, and `options` are further ones of `Launch`.
    """
    nproc = nproc or default_processes()
    variables = {**threads_per_rank(nproc), **(environment or {})}
    return run(Launch([script, *rest], nproc, environment=variables, **options))
