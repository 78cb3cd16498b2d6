"""`register_pass`: adds a pass to the pipeline of every plan, and `disabled_passes`."""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import is_dataclass
from typing import NamedTuple

from torch.utils.hooks import RemovableHandle

from autopar.errors import StrategyError
from autopar.passes.core.pass_base import Pass, describe, known_passes
from autopar.passes.core.pass_pipeline import PassPipeline

DISABLE = "AUTOPAR_DISABLE_PASSES"
"""Environment variable of the passes that training leaves out: names with commas between them."""


class _Registration(NamedTuple):
    item: Pass
    before: str
    after: str


_registered: OrderedDict[int, _Registration] = OrderedDict()


def register_pass(item: Pass, *, before: str = "", after: str = "") -> RemovableHandle:
    """Adds a pass to every pipeline that is built from now on, for planning and for training.

    Call it before `autopar.compile`, with equal passes in the same order on every rank. A plan that
    does not run the named neighbour leaves the pass out. A pass registered twice runs twice.

    Args:
        item: the pass.
        before: name of the pass that follows it, such as "schedule_overlap".
        after: name of the pass that precedes it. By default it runs after all others.

    Returns:
        A handle; `handle.remove()` removes the pass again.

    Raises:
        StrategyError: `item` is not a Pass or no frozen dataclass, a neighbour is unknown, or both
            are given.
    """
    if not isinstance(item, Pass):
        raise StrategyError(f"item={item!r}: give an instance of a subclass of Pass")
    kind = type(item)
    if not (is_dataclass(kind) and kind.__dataclass_params__.frozen):
        raise StrategyError(
            f"{kind.__name__} is no frozen dataclass: write @dataclass(frozen=True) above it"
        )
    if before and after:
        raise StrategyError(f"before={before!r}, after={after!r}: give one of them")
    neighbour = before or after
    if neighbour and neighbour not in known_passes():
        raise StrategyError(
            f"no pass is called {neighbour!r}: choose from {', '.join(sorted(known_passes()))}"
        )
    handle = RemovableHandle(_registered)
    _registered[handle.id] = _Registration(item, before, after)
    return handle


def with_registered(pipeline: PassPipeline, *, is_last: bool) -> PassPipeline:
    """A pipeline with the registered passes; no other pipeline follows if `is_last`."""
    for it in _registered.values():
        names, index = pipeline.names, None
        if it.before in names:
            index = names.index(it.before)
        elif it.after in names:
            index = len(names) - names[::-1].index(it.after)
        elif is_last and not (it.before or it.after):
            index = len(names)
        if index is not None:
            pipeline = PassPipeline((*pipeline[:index], it.item, *pipeline[index:]))
    return pipeline


def disabled_passes() -> tuple[str, ...]:
    """The names in `$AUTOPAR_DISABLE_PASSES`."""
    return tuple(name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip())


def pass_settings() -> tuple[object, ...]:
    """Settings that must be the same on all ranks: disabled and registered passes, with options."""
    added = [(describe(it.item, repr), it.before, it.after) for it in _registered.values()]
    return disabled_passes(), added
