"""Changes that forward makes to Python values: carried as tensors, replayed, or refused by name."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.capture.state.contents import MISSING, PLAIN, Change, Place, contents
from autopar.capture.state.effects import Attribute, Effects, attribute_of, is_state
from autopar.capture.state.fingerprints import Freezer
from autopar.errors import CaptureError

ADVICE = (
    "A graph would do that once, not at every call. Keep what changes in a buffer "
    "(self.register_buffer) and compute it with tensor operations, return it, or let autopar fall "
    "back (fallback=True)."
)


@dataclass(frozen=True)
class Write:
    """A Python value that every call of a program leaves in the model.

    Attributes:
        place: where.
        adds: whether the value is added to the number there; otherwise it replaces what is there.
    """

    place: Place
    adds: bool = False

    def apply(self, model: nn.Module, value: Any) -> None:
        """Leaves the value in `model`."""
        *path, key = self.place.steps
        holder: Any = vars(model.get_submodule(self.place.module))
        for step in path:
            below = holder[step]
            holder = below if isinstance(below, tuple) else contents(below)
        holder[key] = holder[key] + value if self.adds else value


@dataclass(frozen=True)
class Treatment:
    """Attributes that a model is traced with as something else than they are.

    Attributes:
        carried: plain tensors, and frozen parameters, that are inputs and updates of the graph, as
            buffers are.
        counts: ints that a `Count` stands for.
        counting: whether to try that at all.
    """

    carried: frozenset[Attribute] = frozenset()
    counts: frozenset[Attribute] = frozenset()
    counting: bool = True

    def after(self, effects: Effects, changed: Iterable[str]) -> Treatment:
        """The treatment that a run calls for; the same one if it may stay.

        Args:
            effects: of the run.
            changed: names of the frozen parameters that it changed in place.
        """
        if self.counts and (effects.uses or self.counts != effects.added.keys()):
            return replace(self, counts=frozenset(), counting=False)
        read = [c for c in effects.changes if effects.is_read(c.place) and len(c.place.steps) == 1]
        read = [c for c in read if not effects.is_outside(c.place)]
        carried = {_attribute(c) for c in read if is_state(c.old) and alike(c.old, c.new)}
        counts = {_attribute(c) for c in read if type(c.old) is type(c.new) is int}
        carried |= set(map(attribute_of, changed))
        more = replace(self, carried=self.carried | carried)
        return replace(more, counts=self.counts | counts) if self.counting else more

    def after_error(self, effects: Effects) -> Treatment:
        """Another treatment that a run which raised may succeed with; the same one if none."""
        if more := effects.read_tensors() - self.carried:
            return replace(self, carried=self.carried | more)
        if self.counts:
            return replace(self, counts=frozenset(), counting=False)
        return self


def _attribute(change: Change) -> Attribute:
    return change.place.module, change.place.steps[0]


def alike(one: Any, other: Any) -> bool:
    """Whether two values are tensors of one shape and dtype on one device."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


STATES = 8
"""Python states that the calls of a model may lead through before one of them stays."""


def check_changes(effects: Effects, following: Iterable[Effects]) -> None:
    """Refuses changes that cannot be replayed.

    Plain values that forward reads may change a few times, or in turns: each value is a state of
    its own, for which the model is captured when a call comes to it.

    Args:
        effects: the effects of a run.
        following: the effects of the runs after it, each after the changes of those before.

    Raises:
        CaptureError: one of the changes, by name.
    """
    for change in effects.changes:
        if why := _unfit(change, effects):
            raise refusal(effects, change.place, why)
    if not any(effects.is_read(change.place) for change in effects.changes):
        return
    seen: set[Any] = set()
    for later in following:
        changes = [c for c in later.changes if later.is_read(c.place) and not alike(c.old, c.new)]
        state = tuple((str(c.place), Freezer()(c.new)) for c in changes)
        if not changes or state in seen:
            return
        seen.add(state)
        first = next((c for c in changes if not _is_plain(c)), changes[0])
        if len(seen) == STATES or not _is_plain(first):
            now = f"{_text(first.old)} is {_text(first.new)} afterwards"
            raise refusal(later, first.place, f"forward reads it, and {now}")


def _is_plain(change: Change) -> bool:
    """Whether a value that guards compare by its contents takes the place of another."""
    leaves = pytree.tree_leaves((change.old, change.new))
    return all(isinstance(leaf, (*PLAIN, enum.Enum)) for leaf in leaves)


def _unfit(change: Change, effects: Effects) -> str:
    """The reason why a change cannot be replayed; "" if it can."""
    if effects.is_outside(change.place):
        return "it is a variable outside of the model"
    table = change.place.steps[0]
    if table in ("_parameters", "_modules", "_buffers"):
        kind = {"_parameters": "parameter", "_modules": "submodule", "_buffers": "buffer"}[table]
        was, now = _text(change.old), _text(change.new)
        return f"a {kind} that was {was} becomes {now}; make it in __init__, with its final shape"
    if not isinstance(change.container, dict):
        return f"the contents of a {type(change.container).__name__} change"
    if change.new is MISSING:
        return "it is deleted"
    for leaf in pytree.tree_leaves(change.new):
        if not isinstance(leaf, (torch.Tensor, type, enum.Enum, *PLAIN)) and not callable(leaf):
            return f"it becomes {_text(leaf)}"
    return ""


def refusal(effects: Effects, place: Place, why: str) -> CaptureError:
    """The error that names a change, the user's line and what to do."""
    line = effects.line(place)
    name = type(effects.model).__name__
    if effects.is_outside(place):
        text = str(place.steps[0]) + "".join(f"[{step}]" for step in place.steps[1:])
    elif place.steps[0] in ("_parameters", "_modules", "_buffers"):
        text = str(Place(place.module, place.steps[1:]))
    else:
        text = str(place)
    where = f" at {line}" if line else ""
    return CaptureError(f"cannot capture {name}: forward changes {text}{where}: {why}. {ADVICE}")


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype)[6:]} tensor of shape {list(value.shape)}"
    plain = isinstance(value, PLAIN) or value is MISSING
    return repr(value)[:40] if plain else f"a {type(value).__name__}"


def values_of(changes: Sequence[Change], added: dict[Attribute, int]) -> list[Any]:
    """The values that a run leaves, in the order of `writes_of`."""
    return [*(change.new for change in changes), *added.values()]


def writes_of(changes: Sequence[Change], added: dict[Attribute, int]) -> tuple[Write, ...]:
    """Where they belong."""
    counted = (Write(Place(module, (key,)), adds=True) for module, key in added)
    return (*(Write(change.place) for change in changes), *counted)


def rebound(
    model: str,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, Any],
    parameters: Sequence[str],
) -> tuple[str, ...]:
    """The buffers that a run rebound to other tensors of the same type.

    Args:
        model: name of the model, for errors.
        before: parameters and buffers at the start of the run.
        after: the same at its end.
        parameters: names of the parameters among them.

    Raises:
        CaptureError: one is a parameter, is held by several modules, or changes its type.
    """
    found = tuple(name for name, old in before.items() if after[name] is not old)
    for name in found:
        kind = "parameter" if name in parameters else "buffer"
        shared = sum(other is before[name] for other in before.values()) > 1
        why = ""
        if kind == "parameter":
            why = "a parameter can only be changed by an optimizer or in place"
        elif shared:
            why = "several modules hold it; change it in place"
        elif not alike(before[name], after[name]):
            was, now = _text(before[name]), _text(after[name])
            why = f"it was {was} and becomes {now}; register it as it will be"
        if why:
            raise CaptureError(
                f"cannot capture {model}: forward rebinds {kind} {name}: {why}. {ADVICE}"
            )
    return found


def for_all(reads: Iterable[Attribute], columns: Iterable[Sequence[str]]) -> list[Attribute]:
    """Attributes, and the same ones of all modules that stand for the modules that were read.

    Args:
        reads: attributes.
        columns: names of modules of which only some were run, in place of all.
    """
    keys: dict[str, dict[str, None]] = {}
    for name, key in reads:
        keys.setdefault(name, {})[key] = None
    for column in columns:
        every = {key: None for name in column for key in keys.get(name, ())}
        if every:
            keys |= dict.fromkeys(column, every)
    return [(name, key) for name, found in keys.items() for key in found]
