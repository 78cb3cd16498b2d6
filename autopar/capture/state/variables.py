"""`VariableSearch`: variables that a model's code reads, outside of its modules' attributes.

They are globals, closures, class attributes, and defaults of functions. The search begins with the
code of every forward and hook, and follows the functions and methods they name. After a trace it
adds all code that ran.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from autopar.capture.state.code_names import (
    functions_behind,
    is_of_library,
    is_of_user,
    is_packaged,
    kind_is_packaged,
    module_is_fixed,
    names_of,
    nested_code,
    resolved,
)
from autopar.capture.state.contents import (
    HOOKS,
    INTERNAL,
    MAX_CONTAINERS,
    MISSING,
    PLAIN,
    Found,
    ValuePath,
    containers,
    find_containers,
    items,
    leaves,
    member_of,
)

MAX_FUNCTIONS = 400
"""Functions searched before a trace; after it, all that ran."""

Scope = dict[str, Any] | type | CellType | FunctionType


@dataclass(frozen=True)
class Variable:
    """A global in a module's globals, one of a class, a closure's in its cell, or a function's."""

    scope: Scope
    name: str

    @property
    def value(self) -> Any:
        if isinstance(self.scope, dict):
            return self.scope.get(self.name, MISSING)
        if isinstance(self.scope, type):
            return vars(self.scope).get(self.name, MISSING)
        if isinstance(self.scope, FunctionType):
            return getattr(self.scope, self.name, MISSING)
        try:
            return self.scope.cell_contents
        except ValueError:  # not bound yet
            return MISSING

    def set(self, value: Any) -> None:
        if isinstance(self.scope, dict):
            self.scope[self.name] = value
        elif isinstance(self.scope, (type, FunctionType)):
            setattr(self.scope, self.name, value)
        else:
            self.scope.cell_contents = value


class VariableSearch:
    """Variables with values that can change.

    Attributes:
        watched: variables by display name that a trace may change.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.watched: dict[str, Variable] = {}
        self._counts: dict[str, int] = {}
        self._readers: dict[tuple[int, str], set[CodeType]] = {}
        self._executed: set[CodeType] = set()
        self._code: set[CodeType] = set()
        self._functions: dict[tuple[int, type], Any] = {}
        self._model = model
        modules = list(model.modules())
        kinds = dict.fromkeys(map(type, modules))
        if isinstance(loss_fn, nn.Module):
            kinds[type(loss_fn)] = None
        for kind in kinds:
            for entry in getattr(kind, "traced_functions", (getattr(kind, "forward", None),)):
                self._search(entry, kind)
        patched = [vars(m)["forward"] for m in modules if "forward" in vars(m)]
        hooks = [hook for m in modules for table in HOOKS for hook in getattr(m, table).values()]
        for entry in (*patched, *hooks, loss_fn):
            self._search(entry, type(None))
        helpers = dict.fromkeys(type(value) for m in modules for value in vars(m).values())
        for kind in helpers:  # code calls methods of plain objects that modules hold
            if not is_of_library(kind) and not issubclass(kind, nn.Module):  # type: ignore[arg-type]
                for entry in vars(kind).values():
                    self._search(entry, kind)
        if isinstance(loss_fn, nn.Module):
            for name, module in loss_fn.named_modules(prefix="loss_fn"):
                tables = vars(module), module._buffers
                keys = ((t, key) for t in tables for key in t if key not in INTERNAL)
                self.watched |= {f"{name}.{key}": Variable(table, key) for table, key in keys}

    def read(self) -> dict[str, Variable]:
        """The variables of the code that ran; all where nothing was recorded."""
        return self.read_by(self._executed) if self._executed else self.watched

    def read_by(self, codes: Set[CodeType]) -> dict[str, Variable]:
        """The variables of this code, and those whose readers are not known."""
        variables = {}
        for name, variable in self.watched.items():
            readers = self._readers.get((id(variable.scope), variable.name))
            if readers is None or not readers.isdisjoint(codes):
                variables[name] = variable
        return variables

    def add_executed(self, executed: Mapping[CodeType, dict[str, Any]]) -> None:
        """Adds the variables of all code that ran, given with its globals."""
        unseen = {
            code: names
            for code, names in executed.items()
            if code not in self._executed and is_of_user(code, names)
        }
        if not unseen:
            return
        self._executed |= unseen.keys()
        self._executed |= self._code_behind_caches()
        for function in self._functions_in_values():
            self._search(function, type(None))
        for code, names in unseen.items():
            self._search(*resolved(code, names))
        unseen = {c: names for c, names in unseen.items() if c not in self._code}
        if any(code.co_freevars for code in unseen):
            for function in gc.get_referrers(*unseen):
                if isinstance(function, FunctionType):
                    self._search(function, type(None))
        for code, names in unseen.items():
            if code not in self._code:
                self._code |= nested_code(code)
                self._follow(_globals(names, code), code, type(None))

    def _code_behind_caches(self) -> set[CodeType]:
        """Code whose results code that ran has from an `lru_cache`; it need not run again."""
        behind, reached = set[CodeType](), set[CodeType]()
        while True:
            for variable in self.watched.values():
                readers = self._readers.get((id(variable.scope), variable.name), set())
                is_cache = isinstance(variable.value, functools._lru_cache_wrapper)
                if not readers.isdisjoint(behind) or (
                    is_cache and not readers.isdisjoint(self._executed)
                ):
                    reached |= {f.__code__ for f in functions_behind(variable.value)}
            if reached <= behind:
                return behind
            behind |= reached

    def _functions_in_values(self) -> Iterator[FunctionType]:
        """Functions in attributes of the model and in variables."""
        held: Found = {}
        values = [variable.value for variable in self.watched.values()]
        for module in self._model.modules():
            values += [value for key, value in vars(module).items() if key not in INTERNAL]
        for value in values:
            find_containers(value, ValuePath("", ("",)), held, MAX_CONTAINERS)
        inside = [part for container, _ in held.values() for _, part in items(container)]
        for value in leaves((*values, *inside)):
            yield from functions_behind(value)

    def _search(self, entry: Any, kind: type) -> None:
        """Adds the variables that a function of a class, and the functions it names, read."""
        for function in functions_behind(entry):
            key = id(function), kind
            if self._executed:
                is_searched = not self._executed.isdisjoint(nested_code(function.__code__))
            else:
                is_searched = len(self._functions) < MAX_FUNCTIONS
            if is_searched and key not in self._functions:
                self._functions[key] = function
                self._search_function(function, kind)

    def _search_function(self, function: FunctionType, kind: type) -> None:
        code = function.__code__
        self._code |= nested_code(code)
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        name = function.__qualname__
        variables = [(name, Variable(cell, variable)) for variable, cell in cells]
        variables += [(name, Variable(function, key)) for key in _parts_of(function)]
        variables += _globals(function.__globals__, code)
        self._follow(variables, code, kind)

    def _follow(self, variables: list[tuple[str, Variable]], code: CodeType, kind: type) -> None:
        """Adds variables, and those of classes and modules that code reaches by attributes."""
        attributes = names_of(code).attributes
        variables += _of_class(kind, attributes)
        searched = {id(kind)}
        for where, variable in variables:  # grows by the variables of modules and classes
            value = variable.value
            for owner in (value, type(value)) if isinstance(value, type) else (type(value),):
                if id(owner) not in searched:  # members of an enum are of its class again
                    searched.add(id(owner))
                    variables += _of_class(owner, attributes)
            if isinstance(value, ModuleType):
                if not module_is_fixed(value) and id(value) not in searched:
                    searched.add(id(value))
                    named = [name for name in attributes if name in vars(value)]
                    variables += [(value.__name__, Variable(vars(value), name)) for name in named]
                continue
            for function in functions_behind(value):
                scope = variable.scope
                self._search(function, scope if isinstance(scope, type) else type(None))
            if _can_change(variable, value):
                self._add(f"{where}.{variable.name}", variable, code)
        for name in attributes:
            self._search(member_of(kind, name)[1], kind)

    def _add(self, name: str, variable: Variable, code: CodeType) -> None:
        """Adds a variable that code reads; others of its name get numbers."""
        place = id(variable.scope), variable.name
        if place not in self._readers:
            self._readers[place] = set()
            self._counts[name] = count = self._counts.get(name, 0) + 1
            self.watched[f"{name} ({count})" if count > 1 else name] = variable
        self._readers[place] |= nested_code(code)


def _parts_of(function: FunctionType) -> list[str]:
    """Parts of a function that another value may replace, its attributes included."""
    is_plain = all(isinstance(x, PLAIN) for x in function.__defaults__ or ())
    if is_packaged(function.__code__.co_filename) and is_plain and not function.__kwdefaults__:
        return []
    parts = [key for key in ("__defaults__", "__kwdefaults__") if getattr(function, key)]
    return ["__code__", *parts, *(["__dict__"] if vars(function) else [])]


def _can_change(variable: Variable, value: Any) -> bool:
    """Whether a variable can change what code does; functions of packages are taken to stay."""
    if isinstance(value, (*PLAIN, tuple)) or variable.name == "__code__":
        return True
    if callable(value):
        return not _is_packaged(variable.scope) or bool(containers(value))
    return bool(containers(value)) or not isinstance(value, (type, ModuleType, nn.Module))


def _is_packaged(scope: Scope) -> bool:
    """Whether a module or class is of an installed package."""
    if isinstance(scope, type):
        return kind_is_packaged(scope)
    file = scope.get("__file__") if isinstance(scope, dict) else None
    return isinstance(file, str) and is_packaged(file)


def _globals(scope: dict[str, Any], code: CodeType) -> list[tuple[str, Variable]]:
    """Globals that code loads, and modules that it imports as it runs."""
    module, names = str(scope.get("__name__")), names_of(code)
    package = scope.get("__package__") or ""
    imported = (name for each in names.imported for name in (each, f"{package}.{each}"))
    modules = [("sys.modules", Variable(sys.modules, name)) for name in imported]
    loaded = [(module, Variable(scope, name)) for name in names.loaded if name in scope]
    return [*loaded, *(pair for pair in modules if pair[1].name in sys.modules)]


def _of_class(kind: type, attributes: Iterable[str]) -> list[tuple[str, Variable]]:
    """Variables of a user's class, inherited ones included, that code may read by these names."""
    return [
        (f"{each.__module__}.{each.__qualname__}", Variable(each, name))
        for each in kind.__mro__
        if not is_of_library(each)
        for name in attributes
        if name in vars(each)
    ]
