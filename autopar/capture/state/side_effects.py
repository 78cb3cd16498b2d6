"""Lifts, replays or refuses the changes that forward makes to Python values."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar._torch import pytree
from autopar.capture.state.contents import (
    MISSING,
    PLAIN,
    TABLES,
    Attribute,
    Change,
    Fingerprinter,
    ValuePath,
    attribute_of,
    contents,
    same_type,
)
from autopar.capture.state.effects import Effects, can_lift
from autopar.capture.state.hidden_parts import HiddenParts
from autopar.core.ir.graph import source_text
from autopar.errors import CaptureError

ADVICE = (
    "A graph would do that once, not at every call. Keep what changes in a buffer "
    "(self.register_buffer) and compute it with tensor operations, return it, or let autopar fall "
    "back (fallback=True)."
)


@dataclass(frozen=True)
class Write:
    """The path of a Python value that every call replaces, or adds to the number there."""

    path: ValuePath
    adds: bool = False

    def apply(self, model: nn.Module, value: Any) -> None:
        *parents, key = self.path.keys
        container: Any = vars(model.get_submodule(self.path.module))
        for parent in parents:
            child = container[parent]
            container = child if isinstance(child, tuple) else contents(child)
        container[key] = container[key] + value if self.adds else value


@dataclass(frozen=True)
class StatePolicy:
    """Treatment of changing attributes while a model is traced.

    Attributes:
        lifted: plain tensors, and frozen parameters, that become buffers of the graph.
        counters: ints traced as a `CounterProxy`.
        allow_counters: whether ints may be traced as a `CounterProxy`.
    """

    lifted: frozenset[Attribute] = frozenset()
    counters: frozenset[Attribute] = frozenset()
    allow_counters: bool = True

    def after_run(self, effects: Effects, changed: Iterable[str]) -> StatePolicy:
        """The policy for a run that changed these frozen parameters in place; self if it fits."""
        if self.counters and (effects.uses or self.counters != effects.added.keys()):
            return replace(self, counters=frozenset(), allow_counters=False)
        lifted, counters = set(map(attribute_of, changed)), set()
        for c in effects.changes:
            at = c.path.attribute
            if at not in effects.reads or len(c.path.keys) > 1 or effects.is_variable(c.path):
                continue
            if can_lift(c.old) and same_type(c.old, c.new):
                lifted.add(at)
            elif type(c.old) is type(c.new) is int and self.allow_counters:
                counters.add(at)
        return replace(self, lifted=self.lifted | lifted, counters=self.counters | counters)

    def after_error(self, effects: Effects) -> StatePolicy:
        """The next policy to try after a run that raised; equal to this one if there is none."""
        if more := effects.read_tensors() - self.lifted:
            return replace(self, lifted=self.lifted | more)
        if self.counters:
            return replace(self, counters=frozenset(), allow_counters=False)
        return self


MAX_STATES = 8
"""Python states that the calls of a model may pass through before one of them stays."""


def check_changes(effects: Effects, following: Iterable[Effects]) -> None:
    """Refuses changes that cannot be replayed.

    Plain values that forward reads may change a few times, or in a cycle. Each value is a separate
    state, for which the model is captured when a call reaches it. Each of the `following` runs
    starts with the changes of earlier runs.

    Raises:
        CaptureError: a change cannot be replayed; the message names it.
    """
    for change in effects.changes:
        if why := _unsupported(change, effects):
            raise _refusal(effects, change.path, why)
    if not any(effects.is_read(change.path) for change in effects.changes):
        return
    seen: set[Any] = set()
    for later in following:
        changes = [
            c for c in later.changes if later.is_read(c.path) and not same_type(c.old, c.new)
        ]
        state = tuple((str(c.path), Fingerprinter()(c.new)) for c in changes)
        if not changes or state in seen:
            return
        seen.add(state)
        first = next((c for c in changes if not _is_plain(c)), changes[0])
        if len(seen) == MAX_STATES or not _is_plain(first):
            now = f"{_text(first.old)} is {_text(first.new)} afterwards"
            raise _refusal(later, first.path, f"forward reads it, and {now}")


def check_backward_changes(effects: Effects) -> None:
    """Refuses all changes of a backward, which runs once, in the trace.

    Raises:
        CaptureError: it names the first change.
    """
    for change in effects.changes:
        why = _unsupported(change, effects) or f"{_text(change.old)} is {_text(change.new)} after"
        raise _refusal(effects, change.path, why, "a hook or a Function in its backward")


def _is_plain(change: Change) -> bool:
    """Whether guards compare the old and the new value by content."""
    leaves = pytree.tree_leaves((change.old, change.new))
    return all(isinstance(leaf, (*PLAIN, enum.Enum)) for leaf in leaves)


def _unsupported(change: Change, effects: Effects) -> str:
    """The reason why a change cannot be replayed; "" if it can."""
    if effects.is_variable(change.path):
        return "it is a variable outside of the model"
    table = change.path.keys[0]
    if table in TABLES:
        kind = {"_parameters": "parameter", "_modules": "submodule", "_buffers": "buffer"}[table]
        was, now = _text(change.old), _text(change.new)
        return f"a {kind} that was {was} becomes {now}; make it in __init__, with its final shape"
    if not isinstance(change.container, dict):
        holder = change.container
        holder = holder.value if isinstance(holder, HiddenParts) else holder
        return f"the contents of a {type(holder).__name__} change"
    if change.new is MISSING:
        return "it is deleted"
    for leaf in pytree.tree_leaves(change.new):
        if not isinstance(leaf, (torch.Tensor, type, enum.Enum, *PLAIN)) and not callable(leaf):
            return f"it becomes {_text(leaf)}"
    return ""


def _refusal(effects: Effects, path: ValuePath, why: str, code: str = "forward") -> CaptureError:
    if effects.is_variable(path):
        text = path.text
    elif path.keys[0] in TABLES:
        text = str(ValuePath(path.module, path.keys[1:]))
    else:
        text = str(path)
    line = source_text(effects.reads.get(path.attribute))
    where = f" at {line}" if line else ""
    name = type(effects.model).__name__
    return CaptureError(f"cannot capture {name}: {code} changes {text}{where}: {why}. {ADVICE}")


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype)[6:]} tensor of shape {list(value.shape)}"
    plain = isinstance(value, PLAIN) or value is MISSING
    return repr(value)[:40] if plain else f"a {type(value).__name__}"


def writes_of(effects: Effects) -> dict[Write, Any]:
    """The locations that a run writes, with their values."""
    writes = {Write(change.path): change.new for change in effects.changes}
    counted = effects.added.items()
    return writes | {Write(ValuePath(m, (key,)), adds=True): n for (m, key), n in counted}


def rebound_buffers(
    model: str,
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, Any],
    parameters: Sequence[str],
) -> tuple[str, ...]:
    """Buffers that a run of `model` rebound to new tensors of the same type.

    Raises:
        CaptureError: a rebound tensor is a parameter, is shared by modules, or changes its type.
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
        elif not same_type(before[name], after[name]):
            was, now = _text(before[name]), _text(after[name])
            why = f"it was {was} and becomes {now}; register it as it will be"
        if why:
            raise CaptureError(
                f"cannot capture {model}: forward rebinds {kind} {name}: {why}. {ADVICE}"
            )
    return found
