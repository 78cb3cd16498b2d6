"""`Effects`: the Python attributes that one run of a model reads, and those that it changes."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from autopar.capture.provenance import is_library
from autopar.capture.state.contents import (
    INTERNAL,
    MISSING,
    TABLES,
    Change,
    Place,
    Snapshot,
    equal,
    referent,
)
from autopar.capture.state.counting import Count
from autopar.capture.state.outside import Variable

BASE = INTERNAL | vars(nn.Module).keys() - {"forward"}
"""Names that every module has from torch."""

Attribute = tuple[str, str]
"""The name of a module, and of an attribute of it."""


@dataclass
class Effects:
    """The reads and changes of one run; the model is as before when it ends.

    Attributes:
        model: the model that runs.
        outside: variables that its code reads outside of it.
        counts: int attributes that a `Count` stands for.
        keep: leave the changes in the model.
        state: parameters and buffers of the run; lists of them are made again by every run.
        reads: attributes that the run depends on, with the user's file and line.
        classes: attributes that were read of classes.
        changes: replaced, added and deleted values.
        added: what was added to each count.
        uses: uses of counts beside counting.
    """

    model: nn.Module
    outside: Mapping[str, Variable] = field(default_factory=dict)
    counts: frozenset[Attribute] = frozenset()
    keep: bool = False
    state: Sequence[torch.Tensor] = ()
    reads: dict[Attribute, tuple[str, int]] = field(default_factory=dict)
    classes: dict[tuple[type, str], None] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    added: dict[Attribute, int] = field(default_factory=dict)
    uses: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the run inside, and takes its changes back."""
        before = {name: variable.value for name, variable in self.outside.items()}
        snapshot = Snapshot(self.model, before.items())
        for module, key in self.counts:
            attributes = vars(self.model.get_submodule(module))
            attributes[key] = Count(attributes[key], self.uses)
        try:
            with self._recording(snapshot):
                yield
            for name, old in before.items():
                if not equal(old, new := self.outside[name].value):
                    self.changes.append(Change(Place("", (name,)), {}, name, old, new))
            for change in snapshot.changes():
                if self._names_state(change.new):
                    continue
                if type(change.new) is Count:
                    self.added[change.place.module, change.place.steps[0]] = (
                        change.new.counted - change.old
                    )
                else:
                    self.changes.append(change)
        finally:
            if not self.keep:
                snapshot.restore()
                for name, old in before.items():
                    if self.outside[name].value is not old:
                        self.outside[name].set(old)

    def _names_state(self, value: Any) -> bool:
        """Whether a value is a list of the run's own parameters and buffers, or of references."""
        if not isinstance(value, (list, tuple)):
            return False
        own = {id(tensor) for tensor in self.state}
        held = map(referent, value)
        known = [item for item in held if item is not None]
        return bool(known) and all(id(item) in own for item in known)

    @contextlib.contextmanager
    def _recording(self, snapshot: Snapshot) -> Iterator[None]:
        """Notes every attribute that is read of a module and was there before the run."""
        names = {id(module): name for name, module in self.model.named_modules()}

        def read(module: nn.Module, key: str) -> Any:
            name = names.get(id(module))
            if name is not None and key not in BASE and key[:2] != "__":
                self._note(module, name, key, snapshot)
            elif name is not None and key == "__dict__":
                self._note_all(module, name, snapshot)
            return object.__getattribute__(module, key)

        nn.Module.__getattribute__ = read  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            del nn.Module.__getattribute__

    def _note(self, module: nn.Module, name: str, key: str, snapshot: Snapshot) -> None:
        attributes = object.__getattribute__(module, "__dict__")
        now = attributes.get(key, MISSING)
        if now is MISSING:
            if any(key in attributes[table] for table in TABLES):
                return
            self.classes.setdefault((type(module), key))
        before = snapshot.before(attributes)
        if before is not None and (now is before.get(key, MISSING) or type(now) is Count):
            self.reads[name, key] = _position(sys._getframe(2))

    def _note_all(self, module: nn.Module, name: str, snapshot: Snapshot) -> None:
        """Notes every attribute, where the user's code looks at all of them at once."""
        if not is_library(sys._getframe(2).f_code.co_filename):
            for key in object.__getattribute__(module, "__dict__").keys() - INTERNAL:
                self._note(module, name, key, snapshot)

    def line(self, place: Place) -> str:
        """The user's line that read an attribute last, as `file:line: text`; "" if unknown."""
        found = self.reads.get((place.module, place.steps[0]))
        if not found or not found[0]:
            return ""
        file, number = found
        return f"{file.rpartition('/')[2]}:{number}: {linecache.getline(file, number).strip()}"

    def is_read(self, place: Place) -> bool:
        """Whether the run depends on the attribute that a value belongs to."""
        return (place.module, place.steps[0]) in self.reads or self.is_outside(place)

    def is_outside(self, place: Place) -> bool:
        """Whether a value belongs to no module."""
        return not place.module and place.steps[0] in self.outside

    def read_tensors(self) -> frozenset[Attribute]:
        """The plain tensors among the attributes that were read."""
        modules = dict(self.model.named_modules())
        found = ((name, key, vars(modules[name]).get(key)) for name, key in self.reads)
        return frozenset((name, key) for name, key, value in found if is_state(value))


def attribute_of(name: str) -> Attribute:
    """The module and attribute of a parameter or buffer by its full name."""
    module, _, key = name.rpartition(".")
    return module, key


def is_state(value: Any) -> bool:
    """Whether an attribute can be carried from call to call as a buffer is."""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return plain and value.layout is torch.strided and not value.requires_grad


def _position(frame: FrameType | None) -> tuple[str, int]:
    """File and line of the innermost frame of the user's code."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("", 0)
