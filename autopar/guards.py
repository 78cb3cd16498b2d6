"""`Guards`: the Python state that captured programs depend on, compared before every call.

What forward read of a module's plain attributes, its code, hooks and submodules belongs to the key
of a program. A change gives calls another key, so that the model is captured again; a change back
finds the old programs. The comparison is by identity, in loops that run in C; values are compared
only where that fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.contents import HOOKS, MISSING, PLAIN, Container, Place, contents, items
from autopar.effects import Attribute
from autopar.errors import PlanError
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
        self._seen: _Seen | None = None
        self._values: tuple[Any, ...] = ()
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
        if self._seen is not None and self._seen.same():
            return False
        before = dict(self._named())
        self._check_parameters()
        self._see()
        now, fresh = dict(self._named()), self._values not in self._known
        self.state = self._known.setdefault(self._values, len(self._known))
        if fresh and len(set(self._known.values())) == MANY:
            changed = sorted(name for name in now if before.get(name, MISSING) != now[name]) or ["a hook"]
            warnings.warn(
                f"{', '.join(changed[:3])} of {type(self._model).__name__} changed: it is the "
                f"{MANY}th Python state that the model is captured for, and each capture takes "
                "seconds. Keep what changes at every step in a buffer, and fill it in place.",
                stacklevel=5,
            )
        return True

    def forget(self) -> None:
        """Looks everything up again at the next look: parameters were replaced on purpose."""
        self._seen = None

    def rebind(self, holder: dict[str, Any], key: str, value: Any) -> None:
        """Writes a value of the same type as before, which is no change of state."""
        holder[key] = value
        if self._seen is not None:
            self._seen.expect(holder, key, value)

    def _see(self) -> None:
        self._seen = _Seen(self._model, self._reads, self._classes, self._outside)
        self._values = self._fingerprint()

    def _named(self) -> Iterator[tuple[str, Any]]:
        attributes = (str(Place(module, (key,))) for module, key in self._reads)
        return zip([*attributes, *self._outside], self._values, strict=False)

    def _fingerprint(self) -> tuple[Any, ...]:
        """The state as a value that is equal exactly if the programs are the same."""
        modules = dict(self._model.named_modules())
        freeze = _Freezer()
        read = []
        for name, key in self._reads:
            value = vars(modules[name]).get(key, MISSING) if name in modules else MISSING
            is_carried = (name, key) in self.carried and isinstance(value, torch.Tensor)
            read.append(_type(value) if is_carried else freeze(value))
        outside = [freeze(variable.value) for variable in self._outside.values()]
        classes = [_Same(_of_class(kind, key)[1]) for kind, key in self._classes]
        return (*read, *outside, *classes, *(_structure(name, module) for name, module in modules.items()))

    def _check_parameters(self) -> None:
        """Refuses parameters that are others than those that the plan was made for."""
        now = {
            name: (tuple(p.shape), p.dtype) for name, p in self._model.named_parameters()
        }
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


class _Seen:
    """The objects that a state consists of, as they were looked up."""

    def __init__(
        self,
        model: nn.Module,
        reads: Iterable[Attribute],
        classes: Iterable[tuple[type, str]],
        outside: Mapping[str, Variable],
    ) -> None:
        modules = dict(model.named_modules())
        cells: list[tuple[Any, Any, Any]] = []
        self._nested: list[tuple[Container, Any]] = []
        for name, key in reads:
            holder = vars(modules[name]) if name in modules else {}
            cells.append((holder, key, holder.get(key, MISSING)))
            self._nested += _containers(holder.get(key))
        self._cells: list[tuple[Variable, Any]] = []
        for variable in outside.values():
            value = variable.value
            if isinstance(variable.holder, dict):
                cells.append((variable.holder, variable.name, value))
            else:
                self._cells.append((variable, value))
            self._nested += _containers(value)
        self._empty: list[dict[Any, Any]] = []
        self._sized: list[dict[Any, Any]] = []
        for module in modules.values():
            for table in (module._modules, module._parameters, module._buffers):
                cells += [(table, key, value) for key, value in table.items()]
            self._sized.append(module._modules)
            for hooks in (getattr(module, table) for table in HOOKS):
                if hooks:
                    self._nested.append((hooks, dict(hooks)))
                else:
                    self._empty.append(hooks)
        self._sizes = list(map(len, self._sized))
        self._parameters = list(model.parameters())
        self._dtypes = list(map(_dtype, self._parameters))
        self._holders, self._keys = [c[0] for c in cells], [c[1] for c in cells]
        self._objects = [c[2] for c in cells]
        self._at = {(id(holder), key): index for index, (holder, key, _) in enumerate(cells)}
        found = [_of_class(kind, key) for kind, key in classes]
        self._classes = [holder for holder, _ in found]
        self._names, self._members = [key for _, key in classes], [value for _, value in found]

    def same(self) -> bool:
        """Whether all of them are what they were."""
        cells = map(dict.get, self._holders, self._keys, repeat(MISSING))
        members = map(MappingProxyType.get, self._classes, self._names, repeat(MISSING))
        return (
            all(map(is_, cells, self._objects))
            and not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and all(map(is_, members, self._members))
            and list(map(_dtype, self._parameters)) == self._dtypes
            and all(_unchanged(container, copy) for container, copy in self._nested)
            and all(variable.value is value for variable, value in self._cells)
        )

    def expect(self, holder: Any, key: str, value: Any) -> None:
        """Takes a value for the one that was there."""
        if (index := self._at.get((id(holder), key))) is not None:
            self._objects[index] = value


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
            return vars(base), vars(base)[key]  # type: ignore[return-value]
    return vars(kind), MISSING  # type: ignore[return-value]
