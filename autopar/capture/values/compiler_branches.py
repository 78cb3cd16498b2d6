"""`CompilerBranches`: which branch a trace takes where a model asks for a compiler.

A trace follows the plain model, so `torch.compiler.is_compiling()` is false. Code that reads values
of tensors fails there. It is then told of a compiler, and nothing else is: the branches of a
model can differ in their numbers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch

from autopar import _torch
from autopar._torch import FakeTensor, FunctionalTensor, pytree

Site = tuple[tuple[str, int], ...]
"""Files and lines of a model's innermost frames, where it asks."""

DEPTH = 3
"""Frames of a site; libraries ask through one or two helpers."""


class CompilerBranches:
    """Answers to `torch.compiler.is_compiling()` during a trace or a plain call.

    Attributes:
        compiled: sites where the answer is true.
        asked: sites that the last run asked at, the last one last.
    """

    def __init__(self, compiled: frozenset[Site] = frozenset()) -> None:
        self.compiled = compiled
        self.asked: dict[Site, None] = {}
        self._caches: set[Any] = set()
        self._tracing, self._outside = True, frozenset[FrameType]()

    def following(self) -> CompilerBranches | None:
        """The branches to try after a failed trace: the last plain one changes."""
        plain = [site for site in self.asked if site not in self.compiled]
        return CompilerBranches(self.compiled | {plain[-1]}) if plain else None

    @contextlib.contextmanager
    def answering(self, *, tracing: bool = True) -> Iterator[None]:
        """Answers the model's questions inside; torch's own code is told of a trace."""
        self._tracing, self._outside = tracing, frozenset(_stack(sys._getframe()))
        self.asked.clear()
        try:
            with _torch.answer_is_compiling(self._answer):
                yield
        finally:
            for cache in self._caches:
                if _holds_fake(cache):  # plain calls of the model would find them
                    cache.cache_clear()
            self._caches.clear()
            self._outside = frozenset()

    def _answer(self) -> bool:
        asking = sys._getframe(2)  # the caller of is_compiling()
        while _is_torch(asking) and asking.f_code.co_name == "is_compiling" and asking.f_back:
            asking = asking.f_back  # torch has several functions of this name
        if _is_torch(asking):
            return self._tracing
        inside = itertools.takewhile(lambda frame: frame not in self._outside, _stack(asking))
        users = (frame for frame in inside if _package(frame) not in ("torch", "autopar"))
        frames = tuple(itertools.islice(users, DEPTH))
        site = tuple((frame.f_code.co_filename, frame.f_lineno) for frame in frames)
        self.asked.pop(site, None)
        self.asked[site] = None
        if site not in self.compiled:
            self._caches.update(_caches_in_sight(frames))
        return site in self.compiled


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of a call, from the innermost on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_torch(frame: FrameType) -> bool:
    return _package(frame) == "torch"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _caches_in_sight(frames: Iterable[FrameType]) -> Iterator[Any]:
    """Functions with an `lru_cache` that code in these frames can call.

    Libraries fill such a cache in the plain branch, and pass it by under a compiler.
    """
    for frame in frames:
        for value in (*frame.f_locals.values(), *frame.f_globals.values()):
            if isinstance(value, functools._lru_cache_wrapper):
                yield value


def _holds_fake(cached: object) -> bool:
    """Whether a result of a cached function is, or contains, a tensor of a trace."""
    found = [
        x for x in gc.get_referents(cached) if isinstance(x, torch.Tensor | list | tuple | dict)
    ]
    return any(isinstance(x, FakeTensor | FunctionalTensor) for x in pytree.tree_leaves(found))
