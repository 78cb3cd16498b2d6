"""Names that code loads, and the Python functions behind values."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from autopar.capture.provenance import STANDARD, is_library

_BY_TEXT = {"getattr", "hasattr", "globals", "vars", "setattr", "attrgetter"}
"""Functions that read a variable by a name that is a string."""


class Names(NamedTuple):
    """Names that code loads: globals, attributes, and modules that it imports."""

    loaded: tuple[str, ...]
    attributes: tuple[str, ...]
    imported: tuple[str, ...]


_SYMBOLS = re.compile(r"site-packages.(sympy|mpmath)\b")
"""Packages that torch computes symbolic sizes with, as a trace runs."""


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> Names:
    """The names that code loads, nested functions included."""
    loaded: dict[str, None] = {}
    attributes: dict[str, None] = {}
    imported: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded[instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            attributes[instruction.argval] = None
        elif instruction.opname == "IMPORT_NAME":
            imported[instruction.argval] = None
    if _BY_TEXT.intersection(loaded) or "__dict__" in attributes:
        texts = [x for x in code.co_consts if isinstance(x, str) and x.isidentifier()]
        loaded |= dict.fromkeys(texts)
        attributes |= dict.fromkeys(texts)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names_of(constant)
            loaded |= dict.fromkeys(inner.loaded)
            attributes |= dict.fromkeys(inner.attributes)
            imported |= dict.fromkeys(inner.imported)
    return Names(tuple(loaded), tuple(attributes), tuple(imported))


@functools.lru_cache(maxsize=4096)
def nested_code(code: CodeType) -> frozenset[CodeType]:
    """Code, and that of the functions in it."""
    inner = (nested_code(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset({code}).union(*inner)


def functions_behind(value: Any) -> Iterator[FunctionType]:
    """The Python functions behind a function, method, property or partial, but library code.

    A function of a library that wraps others has them in its closure.
    """
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_WRAPPERS:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            waiting.append(value.func)
        elif isinstance(value, property):
            waiting += [value.fget]
        elif isinstance(value, functools.cached_property):
            waiting.append(value.func)
        elif isinstance(value, (MethodType, staticmethod, classmethod)):
            waiting.append(value.__func__)
        elif isinstance(value, FunctionType):
            if value.__module__ == "os" or is_of_user(value.__code__, value.__globals__):
                yield value  # os reads the environment
                continue
            for cell in value.__closure__ or ():
                try:
                    waiting.append(cell.cell_contents)
                except ValueError:  # not bound yet
                    continue
        elif isinstance(value, functools._lru_cache_wrapper):
            waiting.append(value.__wrapped__)
        elif isinstance(value, type) and issubclass(value, torch.autograd.Function):
            waiting += vars(value).values()  # C++ calls its backward


_MOST_WRAPPERS = 100
"""Values that a search for wrapped functions looks at."""


def resolved(code: CodeType, names: dict[str, Any]) -> tuple[FunctionType | None, type]:
    """The function of a module or class that has this code, and its class; None if it has none."""
    member: Any = None
    kind: type = type(None)
    for index, part in enumerate(code.co_qualname.split(".")):
        if part == "<locals>":
            return None, type(None)
        if index and not isinstance(member, type):
            return None, type(None)
        kind = member if index else kind
        member = inspect.getattr_static(member, part, None) if index else names.get(part)
    for function in functions_behind(member):
        if function.__code__ is code:
            return function, kind
    return None, type(None)


@functools.lru_cache(maxsize=4096)
def is_of_library(kind: type) -> bool:
    """Whether a class is built in or of a library."""
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return file is None or not _is_users(file)


def is_of_user(code: CodeType, scope: Mapping[str, Any]) -> bool:
    """Whether code with these globals is neither of torch, of autopar nor of Python's library."""
    file = code.co_filename
    file = str(scope.get("__file__", file)) if file.startswith("<") else file  # made from text
    return _is_users(file)


@functools.lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    if is_library(file) or file.startswith("<frozen") or _SYMBOLS.search(file):
        return False
    return "site-packages" in file or not file.startswith(STANDARD)


def is_packaged(file: str) -> bool:
    """Whether a source file is of an installed package or of Python's library."""
    return "site-packages" in file or file.startswith((STANDARD, "<frozen"))


def kind_is_packaged(kind: type) -> bool:
    """Whether a class is of an installed package or of Python's library."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and is_packaged(file)


def module_is_fixed(module: ModuleType) -> bool:
    """Whether a module's variables are taken for constants."""
    package = module.__name__.partition(".")[0]
    of_python = package in sys.stdlib_module_names and package != "os"  # it has the environment
    return of_python or package in ("torch", "numpy", "autopar")
