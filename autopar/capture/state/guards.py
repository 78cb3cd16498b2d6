"""`Guards`: the Python state that captured programs depend on, compared before every call.

The key of a program includes the plain attributes that forward read, its code, hooks and
submodules. A change gives a new key, so the model is captured again. Undoing the change restores
the old key and its programs. Objects are compared by identity first, in loops that run in C, then
by value.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar._torch import HOOKS_OF_ALL_MODULES
from autopar.capture.state.contents import (
    HOOKS,
    MAX_COMPARED,
    MISSING,
    Attribute,
    ByIdentity,
    Container,
    Fingerprinter,
    Found,
    ValuePath,
    attribute_of,
    copy_of,
    find_containers,
    items,
    member_of,
    referent,
    same_items,
    structure_of,
    tensor_type,
)
from autopar.capture.state.hidden_parts import HiddenParts
from autopar.capture.state.python_backward import BackwardReads
from autopar.capture.state.torch_flags import torch_flags
from autopar.capture.state.variables import Variable
from autopar.core.common.notices import warn_once
from autopar.core.ir.graph import ParameterInfo
from autopar.errors import AutoparWarning, CaptureError, PlanError, StrategyError

MANY_STATES = 8
"""Captured states after which a warning names the attributes that keep changing."""

_dtype = attrgetter("dtype")


class Guards:
    """Compares the Python state of a model with the state that its captures depend on.

    Attributes:
        state: number of the current state, equal on ranks that saw the same changes.
        lifted: plain tensors, and frozen parameters that forward changes, passed to programs as
            buffers.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, ParameterInfo]) -> None:
        self._model, self._parameters = model, parameters
        self._reads: dict[Attribute, None] = {}
        self._classes: dict[tuple[type, str], None] = {}
        self._variables: dict[str, Variable] = {}
        self._backward = BackwardReads()
        self._backward_state: BackwardState | None = None
        self._states: dict[Any, int] = {}
        self.lifted: frozenset[Attribute] = frozenset()
        self._structure: _Structure | None = None
        self._structure_key: tuple[Any, ...] = ()
        self._values: _Values | None = None
        self._key: tuple[Any, ...] = ()
        self._is_current = True
        self.state = 0

    def copy_for(self, model: nn.Module) -> Guards:
        """Guards of a copy of the model, which shares its programs."""
        made = Guards(model, self._parameters)
        made._reads, made._classes = dict(self._reads), dict(self._classes)
        made._variables, made._backward = dict(self._variables), self._backward
        made._states, made.state, made.lifted = self._states, self.state, self.lifted
        return made

    def add(
        self,
        reads: Iterable[Attribute],
        classes: Iterable[tuple[type, str]],
        variables: Mapping[str, Variable],
        lifted: Iterable[Attribute],
        backward: BackwardReads,
    ) -> None:
        """Adds the dependencies of a capture to the state.

        The state keeps its number, unless earlier programs hold newly lifted tensors as constants
        or ran without the hooks that a first call added.
        """
        self._reads |= dict.fromkeys(reads)
        self._classes |= dict.fromkeys(classes)
        self._variables |= variables
        self._backward = self._backward | backward if backward else self._backward
        is_new = not self.lifted.issuperset(lifted)
        self.lifted = self.lifted.union(lifted)
        if self._structure is not None and not self._structure.holds():
            self._structure, is_new = None, True  # the captured call added hooks, which stay
        self._compute_key()
        self._states[self._key] = len(self._states) if is_new else self.state
        self.state = self._states[self._key]

    def lift(self, names: Iterable[str]) -> None:
        """Passes these frozen parameters to programs as buffers."""
        self.lifted = self.lifted.union(map(attribute_of, names))

    def update(self) -> bool:
        """Sets `state` to the model's current state; returns whether it computed a new key.

        Raises:
            PlanError: new parameters have other names, shapes or layouts than the plan's.
        """
        if self._structure is None or not self._structure.holds():
            self._check_parameters()
            if self._structure is not None:
                self._check_layouts(self._structure.layouts)
            self._structure = self._values = None
        if self._values is not None and self._values.holds():
            return False
        before = dict(self._named())
        self._compute_key()
        now, fresh = dict(self._named()), self._key not in self._states
        self.state = self._states.setdefault(self._key, len(self._states))
        if fresh and len(set(self._states.values())) == MANY_STATES:
            changed = sorted(name for name in now if before.get(name, MISSING) != now[name])
            warn_once(
                AutoparWarning,
                f"{', '.join(changed[:3]) or 'a hook'} of {type(self._model).__name__} changed: it "
                f"is the {MANY_STATES}th Python state that the model is captured for, and each "
                "capture takes seconds. Keep what changes at every step in a buffer, and fill it "
                "in place.",
            )
        return True

    @contextlib.contextmanager
    def as_of(self, state: int) -> Iterator[None]:
        """Selects the programs of an earlier state, for a backward."""
        if state == self.state:
            yield
            return
        now, self.state, self._is_current = self.state, state, False
        try:
            yield
        finally:
            self.state, self._is_current = now, True

    def check_current(self) -> None:
        """Checks that the Python state has not changed since the call.

        Raises:
            CaptureError: the state has changed.
        """
        if self._structure is None or self._values is None:
            self.update()
        elif self._is_current and self._structure.holds() and self._values.holds():
            return
        else:
            raise CaptureError(
                f"the backward of {type(self._model).__name__} needs another capture of its "
                "forward, but attributes that forward read have changed since. Run the backward "
                "before the change, or call the model once more after it."
            )

    def for_backward(self) -> BackwardState | None:
        """The state that a backward will compare; None if its code reads none."""
        if not self._backward:
            return None
        state, reads = self._backward_state, self._backward
        if state is None or state.reads is not reads or not state.values.holds():
            modules, variables = dict(self._model.named_modules()), reads.variables.values()
            values = _Values(modules, reads.attributes, reads.classes, list(variables))
            state = BackwardState(reads, values, self._fingerprints(reads))
        self._backward_state = state
        return state

    def check_backward(self, state: BackwardState | None) -> None:
        """Checks that what the code of a backward reads is as it was in the call.

        Raises:
            StrategyError: it has changed.
        """
        if state is None or state.values.holds():
            return
        now = self._fingerprints(state.reads)
        changed = [name for name, was in state.fingerprints.items() if now[name] != was]
        if changed:
            raise StrategyError(
                f"{changed[0]} changed between a call of {type(self._model).__name__} and its "
                "backward. A hook or a Function reads it in the backward, which uses the value of "
                "the call. Change it before the call."
            )

    def _fingerprints(self, reads: BackwardReads) -> dict[str, Any]:
        modules, fingerprint = dict(self._model.named_modules()), Fingerprinter()
        values = {}
        for name, key in reads.attributes:
            value = vars(modules[name]).get(key, MISSING) if name in modules else MISSING
            values[str(ValuePath(name, (key,)))] = fingerprint(value)
        for kind, key in reads.classes:
            values[f"{kind.__qualname__}.{key}"] = ByIdentity(member_of(kind, key)[1])
        outer = {name: fingerprint(variable.value) for name, variable in reads.variables.items()}
        return values | outer

    def invalidate(self) -> None:
        """Accepts replaced parameters; the next `update` compares everything again."""
        self._structure = None

    def rebind(self, values: dict[str, Any], key: str, value: Any) -> None:
        """Assigns a tensor of the same type; the state keeps its number."""
        values[key] = value
        if self._structure is not None and self._values is not None:
            for guard in (self._structure.guard, self._values.guard):
                guard.expect(values, key, value)

    def _compute_key(self) -> None:
        if self._structure is None:
            self._structure = _Structure(self._model)
            modules = self._structure.modules
            hooks = [ByIdentity(x) for table in HOOKS_OF_ALL_MODULES for x in table.values()]
            self._structure_key = *(structure_of(name, m) for name, m in modules.items()), *hooks
        modules, variables = self._structure.modules, list(self._variables.values())
        self._values = _Values(modules, self._reads, self._classes, variables)
        fingerprint = Fingerprinter()
        read = []
        for name, key in self._reads:
            value = vars(modules[name]).get(key, MISSING) if name in modules else MISSING
            is_lifted = (name, key) in self.lifted and isinstance(value, torch.Tensor)
            read.append(tensor_type(value) if is_lifted else fingerprint(value))  # type: ignore[arg-type]
        outer = [fingerprint(variable.value) for variable in variables]
        classes = [ByIdentity(member_of(kind, key)[1]) for kind, key in self._classes]
        self._key = *read, *outer, *classes, self._structure_key, self._values.flags

    def _named(self) -> Iterator[tuple[str, Any]]:
        attributes = (str(ValuePath(module, (key,))) for module, key in self._reads)
        return zip([*attributes, *self._variables], self._key, strict=False)

    def _check_parameters(self) -> None:
        now = {name: (tuple(p.shape), p.dtype) for name, p in self._model.named_parameters()}
        planned = {name: (info.shape, info.dtype) for name, info in self._parameters.items()}
        if now == planned:
            return
        name = next(n for n in {**planned, **now} if now.get(n) != planned.get(n))
        was, is_now = (
            f"{str(types[name][1])[6:]} {list(types[name][0])}" if name in types else "not there"
            for types in (planned, now)
        )
        raise PlanError(
            f"parameter {name} of {type(self._model).__name__} was {was} when autopar.compile was "
            f"called, and is {is_now}. Change modules, dtypes and parametrizations before "
            "autopar.compile, or compile the changed model."
        )

    def _check_layouts(self, planned: Mapping[str, Any]) -> None:
        for name, parameter in self._model.named_parameters():
            if _layout(parameter) != planned[name]:
                raise PlanError(
                    f"parameter {name} of {type(self._model).__name__} was replaced by one that is "
                    "not sharded as the plan says. Replace modules before autopar.compile, or load "
                    "a state by load_state_dict."
                )


@dataclass(frozen=True)
class BackwardState:
    """State that the code of a backward reads, as it was in the call."""

    reads: BackwardReads
    values: _Values
    fingerprints: Mapping[str, Any]


class _Structure:
    """Modules, parameters, buffers and hooks of a model at one time."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        found = list(self.modules.values())
        tables = [t for m in found for t in (m._modules, m._parameters, m._buffers)]
        self.guard = _IdentityGuard((table, key) for table in tables for key in table)
        self._children = [module._modules for module in found if module._modules]
        self._sizes = list(map(len, self._children))
        self._kinds = list(map(type, found))
        self._parameters = list(model.parameters())
        self.layouts = {name: _layout(p) for name, p in model.named_parameters()}
        self._dtypes = list(map(_dtype, self._parameters))
        hooks = [getattr(module, table) for module in found for table in HOOKS]
        hooks += HOOKS_OF_ALL_MODULES
        self._hooked = [(table, dict(table)) for table in hooks if table]
        self._unhooked = [table for table in hooks if not table]
        self._next_hook_id = RemovableHandle.next_id

    def holds(self) -> bool:
        return (
            self.guard.holds()
            and list(map(len, self._children)) == self._sizes
            and list(map(_dtype, self._parameters)) == self._dtypes
            and all(map(is_, map(type, self.modules.values()), self._kinds))
            and all(_unchanged(table, copy) for table, copy in self._hooked)
            and not self._has_new_hooks()
        )

    def _has_new_hooks(self) -> bool:
        """Whether a hook was added; torch numbers the hooks of a process."""
        if self._next_hook_id == RemovableHandle.next_id:
            return False
        if any(self._unhooked):
            return True
        self._next_hook_id = RemovableHandle.next_id
        return False


class _Values:
    """Attributes and variables that programs depend on, at one time."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        reads: Iterable[Attribute],
        classes: Iterable[tuple[type, str]],
        variables: Iterable[Variable],
    ) -> None:
        attributes = [(vars(modules[name]) if name in modules else {}, key) for name, key in reads]
        global_items = [(v.scope, v.name) for v in variables if isinstance(v.scope, dict)]
        self.guard = _IdentityGuard([*attributes, *global_items])
        of_functions = [v for v in variables if isinstance(v.scope, FunctionType)]
        self._code = [
            (attrgetter(key), [v.scope for v in of_functions if v.name == key])
            for key in dict.fromkeys(v.name for v in of_functions)
        ]
        self._parts = [list(map(read, functions)) for read, functions in self._code]
        elsewhere = (dict, FunctionType)
        self._closures = [(v, v.value) for v in variables if not isinstance(v.scope, elsewhere)]
        self.flags = torch_flags()
        held = [values.get(key) for values, key in attributes] + [v.value for v in variables]
        self._nested = [pair for value in held for pair in _containers_in(value)]
        found = [member_of(kind, key) for kind, key in classes]
        self._classes = [attributes for attributes, _ in found]
        self._names, self._members = [key for _, key in classes], [value for _, value in found]

    def holds(self) -> bool:
        members = map(MappingProxyType.get, self._classes, self._names, repeat(MISSING))
        return (
            self.guard.holds()
            and all(map(is_, members, self._members))
            and all(
                all(map(is_, map(read, functions), parts))
                for (read, functions), parts in zip(self._code, self._parts, strict=True)
            )
            and all(_unchanged(container, copy) for container, copy in self._nested)
            and all(variable.value is value for variable, value in self._closures)
            and torch_flags() == self.flags
        )


def _layout(parameter: torch.Tensor) -> Any:
    placements = parameter.placements if isinstance(parameter, DTensor) else None
    return parameter.device.type, placements


class _IdentityGuard:
    """Expected objects of dict items, given as pairs of a dict and a key, which may be absent."""

    def __init__(self, cells: Iterable[tuple[dict[Any, Any], Any]]) -> None:
        pairs = list(cells)
        self._dicts, self._keys = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self._objects = [values.get(key, MISSING) for values, key in pairs]
        self._index = {(id(values), key): index for index, (values, key) in enumerate(pairs)}

    def holds(self) -> bool:
        found = map(dict.get, self._dicts, self._keys, repeat(MISSING))
        return all(map(is_, found, self._objects))

    def expect(self, values: Any, key: str, value: Any) -> None:
        """Replaces the expected object of an item that was present."""
        index = self._index.get((id(values), key))
        if index is not None and self._objects[index] is not MISSING:
            self._objects[index] = value


class _Referents(list[tuple[Any, Any]]):
    """Keys and values of a container, with weak references replaced by their targets."""

    def __init__(self, container: Container) -> None:
        super().__init__((key, referent(value)) for key, value in items(container))


def _unchanged(container: Any, copy: Any) -> bool:
    """Whether a container has the same items, by identity, as a copy from `_containers_in`."""
    if isinstance(container, HiddenParts):
        return same_items(copy_of(container), copy)
    if isinstance(container, set):
        return bool(container == copy)
    if len(container) != len(copy):
        return False
    if isinstance(copy, _Referents):
        pairs = zip(_Referents(container), copy, strict=True)
        return all(key == known and value is old for (key, value), (known, old) in pairs)
    if isinstance(container, dict):
        return all(map(is_, container.values(), copy.values())) and list(container) == list(copy)
    return all(map(is_, container, copy))


def _containers_in(value: Any) -> list[tuple[Container, Any]]:
    """Every container reachable from a value, with a copy of its items."""
    found: Found = {}
    find_containers(value, ValuePath(""), found, MAX_COMPARED)
    copies: list[tuple[Container, Any]] = []
    for container, _ in found.values():
        if isinstance(container, HiddenParts):
            copies.append((container, copy_of(container)))
            continue
        refers = any(isinstance(item, weakref.ref) for _, item in items(container))
        copies.append((container, _Referents(container) if refers else copy_of(container)))
    return copies
