"""`Guards`: the Python state that captured programs depend on, compared before every call.

What forward read of a module's plain attributes, its code, hooks and submodules belongs to the key
of a program. A change gives calls another key, so that the model is captured again; a change back
finds the old programs. The comparison is by identity, in loops that run in C; values are compared
only where that fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat
from operator import attrgetter, is_
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autopar.capture.state.cells import Cells, containers_in, unchanged
from autopar.capture.state.contents import HOOKS, MISSING, PLAIN, Place
from autopar.capture.state.effects import Attribute, attribute_of
from autopar.capture.state.fingerprints import (
    Fingerprint,
    Freezer,
    member_of,
    structure_of,
    type_of,
)
from autopar.capture.state.outside import Variable
from autopar.common.notices import warn_once
from autopar.errors import AutoparWarning, CaptureError, PlanError
from autopar.ir.graph import ParameterInfo

MANY = 8
"""Captured states after which a warning says what keeps changing."""

_dtype = attrgetter("dtype")


class Guards:
    """Compares the Python state of a model with that of its captures.

    Attributes:
        state: number of the present state, the same on every rank that saw the same changes.
        carried: plain tensors, and frozen parameters that forward changes, which programs are
            given as they are given buffers.

    Args:
        model: the model.
        parameters: what a plan knows of its parameters.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, ParameterInfo]) -> None:
        self._model, self._parameters = model, parameters
        self._reads: dict[Attribute, None] = {}
        self._classes: dict[tuple[type, str], None] = {}
        self._outside: dict[str, Variable] = {}
        self.lifted: frozenset[Attribute] = frozenset()
        self._known: dict[Any, int] = {}
        self._structure: _Structure | None = None
        self._shape: tuple[Any, ...] = ()
        self._seen: _Values | None = None
        self._values: tuple[Any, ...] = ()
        self._is_now = True
        self.state = 0

    def copy_for(self, model: nn.Module) -> Guards:
        """The guards of a copy of the model, which has the same programs."""
        made = Guards(model, self._parameters)
        made._reads, made._classes = dict(self._reads), dict(self._classes)
        made._outside = dict(self._outside)
        made._known, made.state, made.lifted = self._known, self.state, self.lifted
        return made

    def add(
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
        more = not self.lifted.issuperset(carried)
        self.lifted = self.lifted.union(carried)
        self._see()
        self._known[self._values] = len(self._known) if more else self.state
        self.state = self._known[self._values]

    def lift(self, names: Iterable[str]) -> None:
        """Gives programs these frozen parameters as they are given buffers."""
        self.lifted = self.lifted.union(map(attribute_of, names))

    def update(self) -> bool:
        """Whether something changed since the last look; then `state` is that of now.

        Raises:
            PlanError: parameters were replaced by others, which the plan does not know.
        """
        if self._structure is None or not self._structure.same():
            self._check_parameters()
            if self._structure is not None:
                self._check_layouts(self._structure.layouts)
            self._structure = self._seen = None
        if self._seen is not None and self._seen.same():
            return False
        before = dict(self._named())
        self._see()
        now, fresh = dict(self._named()), self._values not in self._known
        self.state = self._known.setdefault(self._values, len(self._known))
        if fresh and len(set(self._known.values())) == MANY:
            changed = sorted(name for name in now if before.get(name, MISSING) != now[name])
            warn_once(
                AutoparWarning,
                f"{', '.join(changed[:3]) or 'a hook'} of {type(self._model).__name__} changed: it "
                f"is the {MANY}th Python state that the model is captured for, and each capture "
                "takes seconds. Keep what changes at every step in a buffer, and fill it in place.",
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

    def check_current(self) -> None:
        """Refuses a capture after the Python state has changed.

        Raises:
            CaptureError: the state is no longer that of the call that needs the capture.
        """
        if self._structure is None or self._seen is None:
            self.update()
        elif self._is_now and self._structure.same() and self._seen.same():
            return
        else:
            raise CaptureError(
                f"the backward of {type(self._model).__name__} needs another capture of its "
                "forward, but attributes that forward read have changed since. Run the backward "
                "before the change, or call the model once more after it."
            )

    def invalidate(self) -> None:
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
        freeze = Freezer()
        read = []
        for name, key in self._reads:
            value = vars(modules[name]).get(key, MISSING) if name in modules else MISSING
            is_carried = (name, key) in self.lifted and isinstance(value, torch.Tensor)
            read.append(type_of(value) if is_carried else freeze(value))  # type: ignore[arg-type]
        variables = [freeze(variable.value) for variable in outside]
        classes = [Fingerprint(member_of(kind, key)[1]) for kind, key in self._classes]
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

    def _check_layouts(self, planned: Mapping[str, Any]) -> None:
        """Refuses parameters that do not lie as those did that they stand for."""
        for name, parameter in self._model.named_parameters():
            if _layout(parameter) != planned[name]:
                raise PlanError(
                    f"parameter {name} of {type(self._model).__name__} was replaced by one that is "
                    "not sharded as the plan says. Replace modules before autopar.compile, or load "
                    "other values by load_state_dict."
                )


class _Structure:
    """The modules, parameters, buffers and hooks of a model, as they were looked up."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        found = list(self.modules.values())
        tables = [t for m in found for t in (m._modules, m._parameters, m._buffers)]
        self.cells = Cells((table, key) for table in tables for key in table)
        self._tables = [module._modules for module in found if module._modules]
        self._sizes = list(map(len, self._tables))
        self._parameters = list(model.parameters())
        self.layouts = {name: _layout(p) for name, p in model.named_parameters()}
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
            and all(unchanged(table, copy) for table, copy in self._hooked)
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
        return tuple(structure_of(name, module) for name, module in self.modules.items())


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
        self.cells = Cells([*held, *variables])
        self._closed = [(v, v.value) for v in outside if not isinstance(v.holder, dict)]
        self._nested = [
            pair
            for value in (
                *(holder.get(key) for holder, key in held),
                *(variable.value for variable in outside),
            )
            if not isinstance(value, PLAIN)
            for pair in containers_in(value)
        ]
        found = [member_of(kind, key) for kind, key in classes]
        self._classes = [holder for holder, _ in found]
        self._names, self._members = [key for _, key in classes], [value for _, value in found]

    def same(self) -> bool:
        """Whether all of them are what they were."""
        members = map(MappingProxyType.get, self._classes, self._names, repeat(MISSING))
        return (
            self.cells.same()
            and all(map(is_, members, self._members))
            and all(unchanged(container, copy) for container, copy in self._nested)
            and all(variable.value is value for variable, value in self._closed)
        )


def _layout(parameter: torch.Tensor) -> Any:
    """Device type, and placements of a DTensor."""
    placements = parameter.placements if isinstance(parameter, DTensor) else None
    return parameter.device.type, placements
