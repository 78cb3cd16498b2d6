"""Modules that `import autopar` loads: each rank, command and test worker waits for them."""

import json
import subprocess
import sys

import pytest

import autopar

LATE = ["networkx", "scipy", "torch._dynamo", "torch._inductor", "transformers"]
"""Modules that take long and serve captures, races, solvers and integrations only."""


def run(code: str) -> list[str]:
    """The list of strings that code prints in a new process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def loaded_by(code: str) -> set[str]:
    """The modules that code loads in a new process."""
    return set(run(f"import json, sys\n{code}\nprint(json.dumps(list(sys.modules)))"))


def test_the_package_loads_nothing_heavy() -> None:
    heavy = {*LATE, "numpy", "rich", "sympy", "torch"}
    assert not heavy & loaded_by("import autopar")


@pytest.mark.slow
def test_public_names_load_no_tracer_and_no_solver() -> None:
    assert not {*LATE} & loaded_by("from autopar import *\nimport autopar.cli.main")


def test_names_are_listed_before_they_are_loaded() -> None:
    listed = set(run("import autopar, json\nprint(json.dumps(dir(autopar)))"))
    assert {*autopar.__all__} <= listed


def test_public_names_resolve() -> None:
    for name in autopar.__all__:
        value = getattr(autopar, name)
        assert value is getattr(autopar, name)
        assert value.__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'compiled'"):
        autopar.compiled  # type: ignore[attr-defined]  # noqa: B018
