"""Bytes of tensors in each step, counted where torch's CPU allocator hands them out.

With a C++ compiler, by an allocator in front of torch's own (`counting.cpp`), which sees every
thread: those of gloo too. Without one, by the profiler's records (`benchmarks.memory`), which see
the thread of the training loop and may count a little too much.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch.utils import cpp_extension

from autopar.cost_model.disk_cache import cache_directory, digest
from benchmarks.memory import UNSTEADY, ProfilerCounter

SOURCE = Path(__file__).with_name("counting.cpp")


class Counter(Protocol):
    """Counts what is allocated within the context, and at most in each step of a kind."""

    def __enter__(self) -> Counter: ...

    def __exit__(self, *error: object) -> None: ...

    def step(self, kind: str) -> contextlib.AbstractContextManager[object]:
        """Mark one training step."""
        ...

    def peaks(self) -> dict[str, list[int]]:
        """The most bytes in each steady step of each kind, once the context has been left."""
        ...


def counter() -> Counter:
    """The best counter that this machine has."""
    return AllocatorCounter() if library() is not None else ProfilerCounter()


class AllocatorCounter:
    """Counts in the allocator itself."""

    def __init__(self) -> None:
        found = library()
        assert found is not None
        self.library = found
        self.before = 0
        self.steps: dict[str, list[int]] = {}

    def __enter__(self) -> AllocatorCounter:
        self.before = self.library.counting_now()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @contextlib.contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """Mark one training step."""
        self.library.counting_reset()
        yield
        self.steps.setdefault(kind, []).append(self.library.counting_most() - self.before)

    def peaks(self) -> dict[str, list[int]]:
        """The most bytes in each steady step of each kind."""
        return {kind: peaks[UNSTEADY:] for kind, peaks in self.steps.items()}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The counting allocator, put in front of torch's; None without a compiler."""
    path = _compiled()
    if path is None:
        return None
    found = ctypes.CDLL(str(path))
    found.counting_now.restype = found.counting_most.restype = ctypes.c_int64
    found.counting_install()
    return found


def _compiled() -> Path | None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    name = digest({"source": SOURCE.read_text(), "torch": torch.__version__})
    path = cache_directory() / "counting" / f"{name}.so"
    if path.exists() or compiler is None:
        return path if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        command = [compiler, "-O1", "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(draft)]
        command += [f"-I{folder}" for folder in cpp_extension.include_paths()]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-L{libraries}", "-lc10", f"-Wl,-rpath,{libraries}"]
        if subprocess.run(command, capture_output=True).returncode:
            return None
        draft.replace(path)
    return path
