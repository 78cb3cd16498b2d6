"""Settings of test processes, and the mark of tests that start processes."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.harness import worlds

os.environ["OMP_NUM_THREADS"] = "1"
# An operator that returns an argument is an error to torch's compilers, as where CI is set.
os.environ["TORCHINDUCTOR_ERROR_ON_CUSTOM_OP_ALIASING"] = "1"
# Freed memory stays with a job and its ranks: the suite takes 5 % less time.
os.environ["MALLOC_TRIM_THRESHOLD_"] = os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000000"


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share what one has measured
        cache = tempfile.TemporaryDirectory(prefix="autopar-tests-")
        os.environ["AUTOPAR_CACHE"] = os.environ["AUTOPAR_REPRODUCERS"] = cache.name
        config.add_cleanup(cache.cleanup)
    settings.register_profile("autopar", deadline=None, derandomize=True, database=None)
    settings.load_profile("autopar")


def pytest_collection_finish() -> None:
    """Exempt what is imported by now from garbage collection, and collect the rest less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Let every test see the warnings that autopar gives once a process."""
    if notices := sys.modules.get("autopar.core.common.notices"):
        notices.ISSUED.clear()


STARTS = (worlds, worlds.run, worlds.run_isolated, subprocess)
"""Modules and functions that start processes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests whose code reaches one of `STARTS`, so that `-m "not processes"` is quick."""
    for item in items:
        if isinstance(item, pytest.Function):
            fixtures = item._fixtureinfo.name2fixturedefs.values()
            used = [item.function, *(each.func for found in fixtures for each in found)]
            if any(starts_processes(function, set()) for function in used):
                item.add_marker("processes")


def starts_processes(function: Callable[..., Any], seen: set[Any]) -> bool:
    """Whether the code of a function names one of `STARTS`, itself or by functions of ours."""
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    values = [function.__globals__.get(name) for name in names_in(function.__code__)]
    if any(value is each for value in values for each in STARTS):
        return True
    ours = (
        v for v in values if str(getattr(v, "__module__", "")).startswith(("tests.", "benchmarks."))
    )
    return any(starts_processes(value, seen) for value in ours)


def names_in(code: CodeType) -> Iterator[str]:
    """The global names that a code object uses, with those of functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
