"""`Effects`: the Python attributes that one run of a model reads or changes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.capture.provenance import is_library, user_position
from autopar.capture.state.contents import (
    INTERNAL,
    MISSING,
    TABLES,
    Attribute,
    Change,
    Snapshot,
    ValuePath,
    equal,
    referent,
)
from autopar.capture.state.variables import Variable

BASE = INTERNAL | vars(nn.Module).keys() - {"forward"}
"""Names that every module inherits from torch."""


@dataclass
class Effects:
    """Reads and changes of one run of a model.

    Attributes:
        counters: int attributes traced as a `CounterProxy`.
        keep: whether to keep the changes after the run.
        state: parameters and buffers of the run; lists of them are not changes.
        reads: attributes that the run depends on, with the user's file and line.
        classes: class attributes that the run depends on.
        added: increments of the counters.
        uses: operations that needed the value of a counter.
        set_up: whether the run added hooks to modules, which stay.
    """

    model: nn.Module
    variables: Mapping[str, Variable] = field(default_factory=dict)
    counters: frozenset[Attribute] = frozenset()
    keep: bool = False
    state: Sequence[torch.Tensor] = ()
    reads: dict[Attribute, tuple[str, int] | None] = field(default_factory=dict)
    classes: dict[tuple[type, str], None] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    added: dict[Attribute, int] = field(default_factory=dict)
    uses: list[str] = field(default_factory=list)
    set_up: bool = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records the run inside, then restores the model unless `keep`."""
        before = {name: variable.value for name, variable in self.variables.items()}
        snapshot = Snapshot(self.model, before.items())
        for module, key in self.counters:
            attributes = vars(self.model.get_submodule(module))
            attributes[key] = CounterProxy(attributes[key], self.uses, (module, key))
        try:
            with self._recording_reads(snapshot):
                yield
            for name, old in before.items():
                if not equal(old, new := self.variables[name].value):
                    self.changes.append(Change(ValuePath("", (name,)), {}, name, old, new))
            for change in snapshot.changes():
                if self._is_state_list(change.new):
                    continue
                if type(change.new) is CounterProxy:
                    self.added[change.path.attribute] = change.new.value - change.old
                else:
                    self.changes.append(change)
        finally:
            self.set_up = snapshot.has_new_hooks()
            if not self.keep:
                snapshot.restore()
                for name, old in before.items():
                    if self.variables[name].value is not old:
                        self.variables[name].set(old)

    def _is_state_list(self, value: Any) -> bool:
        """Whether a value lists the run's own parameters and buffers, or references to them."""
        if not isinstance(value, (list, tuple)):
            return False
        state = {id(tensor) for tensor in self.state}
        targets = [target for target in map(referent, value) if target is not None]
        return bool(targets) and all(id(target) in state for target in targets)

    @contextlib.contextmanager
    def _recording_reads(self, snapshot: Snapshot) -> Iterator[None]:
        """Records every attribute that is read from a module and existed before the run."""
        names = {id(module): name for name, module in self.model.named_modules()}

        def read(module: nn.Module, key: str) -> Any:
            name = names.get(id(module))
            if name is not None and key not in BASE and key[:2] != "__":
                self._record(module, name, key, snapshot)
            elif name is not None and key == "__dict__":
                self._record_all(module, name, snapshot)
            return object.__getattribute__(module, key)

        nn.Module.__getattribute__ = read  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__

    def _record(self, module: nn.Module, name: str, key: str, snapshot: Snapshot) -> None:
        attributes = object.__getattribute__(module, "__dict__")
        now = attributes.get(key, MISSING)
        if now is MISSING:
            if any(key in attributes[table] for table in TABLES):
                return
            self.classes.setdefault((type(module), key))
        before = snapshot.copy_of(attributes)
        # A value that the run itself has assigned is no state that its graph depends on.
        if before is not None and (now is before.get(key, MISSING) or type(now) is CounterProxy):
            self.reads[name, key] = user_position(sys._getframe(2))

    def _record_all(self, module: nn.Module, name: str, snapshot: Snapshot) -> None:
        if not is_library(sys._getframe(2).f_code.co_filename):
            for key in object.__getattribute__(module, "__dict__").keys() - INTERNAL:
                self._record(module, name, key, snapshot)

    def is_read(self, path: ValuePath) -> bool:
        """Whether the run depends on the attribute that holds a value."""
        return path.attribute in self.reads or self.is_variable(path)

    def is_variable(self, path: ValuePath) -> bool:
        return not path.module and path.keys[0] in self.variables

    def read_tensors(self) -> frozenset[Attribute]:
        modules = dict(self.model.named_modules())
        found = ((name, key, vars(modules[name]).get(key)) for name, key in self.reads)
        return frozenset((name, key) for name, key, value in found if can_lift(value))


def can_lift(value: Any) -> bool:
    """Whether an attribute can be lifted to a buffer of the graph."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return plain and value.layout is torch.strided and not value.requires_grad


@dataclass(frozen=True)
class CounterValue:
    """A result of a call: the number that a counter has before it, and more."""

    counter: Attribute
    added: int

    def before_writes(self, model: nn.Module) -> int:
        module, key = self.counter
        number: int = vars(model.get_submodule(module))[key]
        return number + self.added


class CounterProxy:
    """Stand-in for an int that forward may only increment; appends every other use to `uses`."""

    def __init__(
        self, value: int, uses: list[str], counter: Attribute | None = None, added: int = 0
    ) -> None:
        self.value, self._uses = value, uses
        self._counter, self._added = counter, added

    def __add__(self, other: Any) -> Any:
        if type(other) is int:
            return self._plus(other)
        return self.use("+") + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if type(other) is int:
            return self._plus(-other)
        return self.use("-") - other

    def _plus(self, number: int) -> CounterProxy:
        return CounterProxy(self.value + number, self._uses, self._counter, self._added + number)

    def as_result(self) -> Any:
        """Stands for the number in the result of a call."""
        if self._counter is None:
            return self.use("return")
        return CounterValue(self._counter, self._added)

    def use(self, operation: str) -> int:
        """The number, for an operation that depends on it."""
        self._uses.append(operation)
        return self.value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """`int`, for `isinstance`; torch's own checks in nn.Module do not count as a use."""
        if not is_library(sys._getframe(1).f_code.co_filename):
            self.use("isinstance")
        return int


def _recorded(name: str) -> Any:
    def method(self: CounterProxy, *args: Any) -> Any:
        return getattr(self.use(name), name)(*args)

    return method


USES = (
    "bool int index float complex hash str repr format neg pos abs invert eq ne lt le gt ge mul "
    "rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow rpow rsub and rand or "
    "ror xor rxor lshift rlshift rshift rrshift round"
)
"""Methods of int, without underscores, whose result depends on the number."""

for _name in USES.split():
    setattr(CounterProxy, f"__{_name}__", _recorded(f"__{_name}__"))
