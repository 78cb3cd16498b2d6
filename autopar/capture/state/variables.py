"""`find_variables`: the global variables and closures that a model's code reads.

The search covers the code of every forward and hook, and of the functions and methods they name.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from autopar.capture.provenance import is_library
from autopar.capture.state.contents import HOOKS, INTERNAL, MISSING, PLAIN, contents, member_of

MAX_FUNCTIONS = 400
"""Functions searched for one model."""


@dataclass(frozen=True)
class Variable:
    """A global variable in a module's globals, one of a class, or a closure's in its cell."""

    scope: dict[str, Any] | type | CellType
    name: str

    @property
    def value(self) -> Any:
        if isinstance(self.scope, dict):
            return self.scope.get(self.name, MISSING)
        if isinstance(self.scope, type):
            return vars(self.scope).get(self.name, MISSING)
        try:
            return self.scope.cell_contents
        except ValueError:  # not bound yet
            return MISSING

    def set(self, value: Any) -> None:
        if isinstance(self.scope, dict):
            self.scope[self.name] = value
        elif isinstance(self.scope, type):
            setattr(self.scope, self.name, value)
        else:
            self.scope.cell_contents = value


def find_variables(model: nn.Module, loss_fn: Callable[..., Any] | None) -> Mapping[str, Variable]:
    """Variables with values that can change, by display name."""
    found: dict[str, Variable] = {}
    seen: set[CodeType] = set()
    modules = list(model.modules())
    kinds = dict.fromkeys(map(type, modules))
    if isinstance(loss_fn, nn.Module):
        kinds[type(loss_fn)] = None
    for kind in kinds:
        for entry in getattr(kind, "traced_functions", (getattr(kind, "forward", None),)):
            _search(entry, kind, found, seen)
    patched = [vars(m)["forward"] for m in modules if "forward" in vars(m)]
    hooks = [hook for m in modules for table in HOOKS for hook in getattr(m, table).values()]
    for entry in (*patched, *hooks, loss_fn):
        _search(entry, type(None), found, seen)
    helpers = dict.fromkeys(type(value) for m in modules for value in vars(m).values())
    for kind in helpers:  # code calls methods of plain objects that modules hold
        if not _is_of_library(kind) and not issubclass(kind, nn.Module):
            for entry in vars(kind).values():
                _search(entry, kind, found, seen)
    if isinstance(loss_fn, nn.Module):
        for name, module in loss_fn.named_modules(prefix="loss_fn"):
            tables = vars(module), module._buffers
            keys = ((t, key) for t in tables for key in t if key not in INTERNAL)
            found |= {f"{name}.{key}": Variable(table, key) for table, key in keys}
    return found


def _python_function(value: Any) -> FunctionType | None:
    """The function behind a method, property or partial; None for library code."""
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, (MethodType, staticmethod, classmethod)):
        value = value.__func__
    if not isinstance(value, FunctionType) or is_library(value.__code__.co_filename):
        return None
    return value


def _search(entry: Any, kind: type, found: dict[str, Variable], seen: set[CodeType]) -> None:
    """Adds the variables that a function of a class, and the functions it names, read."""
    function = _python_function(entry)
    if function is None or function.__code__ in seen or len(seen) >= MAX_FUNCTIONS:
        return
    code = function.__code__
    seen.add(code)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    variables = [(function.__qualname__, Variable(cell, name)) for name, cell in cells]
    loaded, attributes = _names(code)
    variables += [
        (str(function.__globals__.get("__name__")), Variable(function.__globals__, name))
        for name in loaded
        if name in function.__globals__
    ]
    variables += _of_class(kind, attributes)
    searched = {id(kind)}
    for where, variable in variables:  # grows by the variables of modules and classes
        value = variable.value
        owner = value if isinstance(value, type) else type(value)
        if id(owner) not in searched:  # members of an enum are of its class again
            searched.add(id(owner))
            variables += _of_class(owner, attributes)
        if isinstance(value, ModuleType):
            if not _is_fixed(value) and id(value) not in searched:
                searched.add(id(value))
                named = [name for name in attributes if name in vars(value)]
                variables += [(value.__name__, Variable(vars(value), name)) for name in named]
        elif _python_function(value) is not None:
            scope = variable.scope
            _search(value, scope if isinstance(scope, type) else type(None), found, seen)
        elif isinstance(value, (*PLAIN, tuple, enum.Enum, torch.Tensor)) or (
            contents(value) is not None
        ):
            found.setdefault(f"{where}.{variable.name}", variable)
    for name in attributes:
        _search(member_of(kind, name)[1], kind, found, seen)


def _of_class(kind: type, attributes: Iterable[str]) -> list[tuple[str, Variable]]:
    """Variables of a user's class, inherited ones included, that code may read by these names."""
    return [
        (f"{each.__module__}.{each.__qualname__}", Variable(each, name))
        for each in kind.__mro__
        if not _is_of_library(each)
        for name in attributes
        if name in vars(each)
    ]


def _is_of_library(kind: type) -> bool:
    """Whether a class is built in or of a library."""
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return file is None or is_library(file)


def _is_fixed(module: ModuleType) -> bool:
    """Whether a module's variables are taken for constants."""
    package = module.__name__.partition(".")[0]
    of_python = package in sys.stdlib_module_names and package != "os"  # it has the environment
    return of_python or package in ("torch", "numpy", "autopar")


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The globals and attributes that code loads, nested functions included."""
    loaded: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded[instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _names(constant)
            loaded |= dict.fromkeys(inner[0])
            attributes |= dict.fromkeys(inner[1])
    return tuple(loaded), tuple(attributes)
