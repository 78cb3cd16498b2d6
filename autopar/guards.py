"""`Guards`: the Python state that captured programs depend on, compared before every call.

What forward read of a module's plain attributes, its code, hooks and submodules belongs to the key
of a program. A change gives calls another key, so that the model is captured again; a change back
finds the old programs. The comparison is by identity, in loops that run in C; values are compared
only where that fails.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, contains, getitem, is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autopar.contents import HOOKS, MISSING, PLAIN, Container, Place, contents, items
from autopar.effects import Attribute
from autopar.errors import CaptureError, PlanError
from autopar.graph import ParameterInfo
from autopar.outside import Variable

DEPTH, MOST = 6, 500
"""Levels below an attribute, and containers, that are compared."""

MANY = 8
"""Captured states after which a warning says what keeps changing."""

_dtype = attrgetter("dtype")


class Guards:
    """Compares the Python state of a model with that of its captures.

    Attributes:
        state: number of the present state, the same on every rank that saw the same changes.
        carried: plain tensors that programs are given, as they are given buffers.

    Args:
        model: the model.
        parameters: what a plan knows of its parameters.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, ParameterInfo]) -> None:
        self._model, self._parameters = model, parameters
        self._reads: dict[Attribute, None] = {}
        self._classes: dict[tuple[type, str], None] = {}
        self._outside: dict[str, Variable] = {}
        self.carried: frozenset[Attribute] = frozenset()
        self._known: dict[Any, int] = {}
        self._structure: _Structure | None = None
        self._shape: tuple[Any, ...] = ()
        self._seen: _Values | None = None
        self._values: tuple[Any, ...] = ()
        self._is_now = True
        self.state = 0

    def copied(self, model: nn.Module) -> Guards:
        """The guards of a copy of the model, which has the same programs."""
        made = Guards(model, self._parameters)
        made._reads, made._classes = dict(self._reads), dict(self._classes)
        made._outside = dict(self._outside)
        made._known, made.state, made.carried = self._known, self.state, self.carried
        return made

    def watch(
        self,
        reads: Iterable[Attribute],
        classes: Iterable[tuple[type, str]],
        outside: Mapping[str, Variable],
        carried: Iterable[Attribute],
    ) -> None:
        """Makes what a capture depends on part of the state.

        The state keeps its number, unless other programs have as constants what is carried now.
        """
        self._reads |= dict.fromkeys(reads)
        self._classes |= dict.fromkeys(classes)
        self._outside |= outside
        more = not self.carried.issuperset(carried)
        self.carried = self.carried.union(carried)
        self._see()
        self._known[self._values] = len(self._known) if more else self.state
        self.state = self._known[self._values]

    def look(self) -> bool:
        """Whether something changed since the last look; then `state` is that of now.

        Raises:
            PlanError: parameters were replaced by others, which the plan does not know.
        """
        if self._structure is None or not self._structure.same():
            self._check_parameters()
            self._structure = self._seen = None
        if self._seen is not None and self._seen.same():
            return False
        before = dict(self._named())
        self._see()
        now, fresh = dict(self._named()), self._values not in self._known
        self.state = self._known.setdefault(self._values, len(self._known))
        if fresh and len(set(self._known.values())) == MANY:
            changed = sorted(name for name in now if before.get(name, MISSING) != now[name])
            warnings.warn(
                f"{', '.join(changed[:3]) or 'a hook'} of {type(self._model).__name__} changed: it "
                f"is the {MANY}th Python state that the model is captured for, and each capture "
                "takes seconds. Keep what changes at every step in a buffer, and fill it in place.",
                stacklevel=5,
            )
        return True

    @contextlib.contextmanager
    def as_of(self, state: int) -> Iterator[None]:
        """Looks programs up for an earlier state, as a backward needs them."""
        if state == self.state:
            yield
            return
        now, self.state, self._is_now = self.state, state, False
        try:
            yield
        finally:
            self.state, self._is_now = now, True

    def check_now(self) -> None:
        """Refuses a capture after the Python state has changed.

        Raises:
            CaptureError: the state is no longer that of the call that needs the capture.
        """
        if self._structure is None or self._seen is None:
            self.look()
        elif self._is_now and self._structure.same() and self._seen.same():
            return
        else:
            raise CaptureError(
                f"the backward of {type(self._model).__name__} needs another capture of its "
                "forward, but attributes that forward read have changed since. Run the backward "
                "before the change, or call the model once more after it."
            )

    def forget(self) -> None:
        """Looks everything up again at the next look: parameters were replaced on purpose."""
        self._structure = None

    def rebind(self, holder: dict[str, Any], key: str, value: Any) -> None:
        """Writes a value of the same type as before, which is no change of state."""
        holder[key] = value
        if self._structure is not None and self._seen is not None:
            self._structure.cells.expect(holder, key, value)
            self._seen.cells.expect(holder, key, value)

    def _see(self) -> None:
        if self._structure is None:
            self._structure = _Structure(self._model)
            self._shape = self._structure.fingerprint()
        modules, outside = self._structure.modules, list(self._outside.values())
        self._seen = _Values(modules, self._reads, self._classes, outside)
        freeze = _Freezer()
        read = []
        for name, key in self._reads:
            value = vars(modules[name]).get(key, MISSING) if name in modules else MISSING
            is_carried = (name, key) in self.carried and isinstance(value, torch.Tensor)
            read.append(_type(value) if is_carried else freeze(value))  # type: ignore[arg-type]
        variables = [freeze(variable.value) for variable in outside]
        classes = [_Same(_of_class(kind, key)[1]) for kind, key in self._classes]
        self._values = *read, *variables, *classes, self._shape

    def _named(self) -> Iterator[tuple[str, Any]]:
        """The last look's values by name."""
        attributes = (str(Place(module, (key,))) for module, key in self._reads)
        return zip([*attributes, *self._outside], self._values, strict=False)

    def _check_parameters(self) -> None:
        """Refuses parameters that are others than those that the plan was made for."""
        now = {name: (tuple(p.shape), p.dtype) for name, p in self._model.named_parameters()}
        planned = {name: (info.shape, info.dtype) for name, info in self._parameters.items()}
        if now == planned:
            return
        name = next(n for n in {**planned, **now} if now.get(n) != planned.get(n))
        was, is_now = (
            f"{str(found[1])[6:]} {list(found[0])}" if found else "not there"
            for found in (planned.get(name), now.get(name))
        )
        raise PlanError(
            f"parameter {name} of {type(self._model).__name__} was {was} when autopar.compile was "
            f"called, and is {is_now}. Change modules, dtypes and parametrizations before "
            "autopar.compile, or compile the changed model."
        )


class _Cells:
    """Items of dicts, and the objects that they are to be."""

    def __init__(self, cells: Iterable[tuple[dict[Any, Any], Any]]) -> None:
        present: list[tuple[dict[Any, Any], Any]] = []
        absent: list[tuple[dict[Any, Any], Any]] = []
        for cell in cells:
            (present if cell[1] in cell[0] else absent).append(cell)
        self._holders, self._keys = [c[0] for c in present], [c[1] for c in present]
        self._objects = [holder[key] for holder, key in present]
        self._without, self._names = [c[0] for c in absent], [c[1] for c in absent]
        self._at = {(id(holder), key): index for index, (holder, key) in enumerate(present)}

    def same(self) -> bool:
        """Whether every item is the same object, and what was not there is still not there."""
        try:
            found = map(getitem, self._holders, self._keys)
            return all(map(is_, found, self._objects)) and not any(
                map(contains, self._without, self._names)
            )
        except KeyError:
            return False

    def expect(self, holder: Any, key: str, value: Any) -> None:
        """Takes a value for the one that was there."""
        if (index := self._at.get((id(holder), key))) is not None:
            self._objects[index] = value


class _Structure:
    """The modules, parameters, buffers and hooks of a model, as they were looked up."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        found = list(self.modules.values())
        tables = [t for m in found for t in (m._modules, m._parameters, m._buffers)]
        self.cells = _Cells((table, key) for table in tables for key in table)
        self._tables = [module._modules for module in found if module._modules]
        self._sizes = list(map(len, self._tables))
        self._parameters = list(model.parameters())
        self._dtypes = list(map(_dtype, self._parameters))
        hooks = [getattr(module, table) for module in found for table in HOOKS]
        self._hooked = [(table, dict(table)) for table in hooks if table]
        self._unhooked = [table for table in hooks if not table]
        self._hooks = RemovableHandle.next_id

    def same(self) -> bool:
        """Whether all of it is what it was."""
        return (
            self.cells.same()
            and list(map(len, self._tables)) == self._sizes
            and list(map(_dtype, self._parameters)) == self._dtypes
            and all(_unchanged(table, copy) for table, copy in self._hooked)
            and not self._has_new_hooks()
        )

    def _has_new_hooks(self) -> bool:
        """Whether a hook was added: torch counts the hooks of this process."""
        if self._hooks == RemovableHandle.next_id:
            return False
        if any(self._unhooked):
            return True
        self._hooks = RemovableHandle.next_id
        return False

    def fingerprint(self) -> tuple[Any, ...]:
        """A value that is equal for models of equal structure."""
        return tuple(_structure(name, module) for name, module in self.modules.items())


class _Values:
    """The attributes and variables that programs depend on, as they were looked up."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        reads: Iterable[Attribute],
        classes: Iterable[tuple[type, str]],
        outside: Iterable[Variable],
    ) -> None:
        held = [(vars(modules[name]) if name in modules else {}, key) for name, key in reads]
        variables = [(v.holder, v.name) for v in outside if isinstance(v.holder, dict)]
        self.cells = _Cells([*held, *variables])
        self._closed = [(v, v.value) for v in outside if not isinstance(v.holder, dict)]
        self._nested = [
            pair
            for value in (
                *(holder.get(key) for holder, key in held),
                *(variable.value for variable in outside),
            )
            if not isinstance(value, PLAIN)
            for pair in _containers(value)
        ]
        found = [_of_class(kind, key) for kind, key in classes]
        self._classes = [holder for holder, _ in found]
        self._names, self._members = [key for _, key in classes], [value for _, value in found]

    def same(self) -> bool:
        """Whether all of them are what they were."""
        members = map(MappingProxyType.get, self._classes, self._names, repeat(MISSING))
        return (
            self.cells.same()
            and all(map(is_, members, self._members))
            and all(_unchanged(container, copy) for container, copy in self._nested)
            and all(variable.value is value for variable, value in self._closed)
        )


def _unchanged(container: Any, copy: Any) -> bool:
    if isinstance(container, set):
        return bool(container == copy)
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        return all(map(is_, container.values(), copy.values())) and list(container) == list(copy)
    return all(map(is_, container, copy))


def _containers(value: Any) -> list[tuple[Container, Any]]:
    """Every container that a value leads to, with a copy of its items."""
    found: dict[int, tuple[Container, Any]] = {}

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, tuple):
            for part in value:
                visit(part, depth)
            return
        container = contents(value)
        if container is None or id(container) in found or depth == 0 or len(found) == MOST:
            return
        kind = next((k for k in (dict, set) if isinstance(container, k)), list)
        found[id(container)] = container, kind(container)
        for _, part in items(container):
            visit(part, depth - 1)

    visit(value, DEPTH)
    return list(found.values())


@dataclass(frozen=True, eq=False)
class _Same:
    """Equal to what holds the same object, which it keeps alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Freezer:
    """Makes hashable values of a model's attributes.

    Equal contents give equal values. Objects that cannot be looked into are equal to themselves.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def __call__(self, value: Any, depth: int = DEPTH) -> Any:
        if isinstance(value, float):
            return float, value.hex()
        if isinstance(value, PLAIN):
            return type(value), value
        if isinstance(value, tuple):
            return (type(value), *(self(part, depth) for part in value))
        container = contents(value)
        if container is None or (not container and container is not value):
            return _Same(value)
        if (number := self._seen.get(id(container))) is not None:
            return "container", number
        if depth == 0 or len(self._seen) == MOST:
            return _Same(value)
        self._seen[id(container)] = len(self._seen)
        if isinstance(container, set):
            return type(value), frozenset(self(part, depth - 1) for part in container)
        pairs = ((_key(key), self(part, depth - 1)) for key, part in items(container))
        return type(value), *pairs


def _key(key: Any) -> Any:
    return key if isinstance(key, PLAIN) else _Same(key)


def _type(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def _structure(name: str, module: nn.Module) -> Any:
    """What a module consists of beside its attributes."""
    hooks = tuple(_Same(hook) for table in HOOKS for hook in getattr(module, table).values())
    buffers = tuple((key, _type(buffer)) for key, buffer in module._buffers.items())
    return name, type(module), tuple(module._modules), tuple(module._parameters), buffers, hooks


def _of_class(kind: type, key: str) -> tuple[MappingProxyType[str, Any], Any]:
    """The class that has an attribute, as its dict, and the attribute; its own dict for none."""
    for base in kind.__mro__:
        if key in vars(base):
            return vars(base), vars(base)[key]
    return vars(kind), MISSING
