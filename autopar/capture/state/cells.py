"""`Cells`: comparison of many Python objects by identity, in loops that run in C."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from operator import contains, getitem, is_
from typing import Any

from autopar.capture.state.contents import Container, contents, items, referent
from autopar.capture.state.fingerprints import DEPTH, MOST


class Cells:
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


class _Referents(list[tuple[Any, Any]]):
    """Keys and values of a container with weak references, which it holds by their objects."""

    def __init__(self, container: Container) -> None:
        super().__init__((key, referent(value)) for key, value in items(container))


def unchanged(container: Any, copy: Any) -> bool:
    if isinstance(copy, _Referents):
        pairs = zip(_Referents(container), copy, strict=False)
        return len(container) == len(copy) and all(
            key == known and value is before for (key, value), (known, before) in pairs
        )
    if isinstance(container, set):
        return bool(container == copy)
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        return all(map(is_, container.values(), copy.values())) and list(container) == list(copy)
    return all(map(is_, container, copy))


def containers_in(value: Any) -> list[tuple[Container, Any]]:
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
        parts = [part for _, part in items(container)]
        kind = next((k for k in (dict, set) if isinstance(container, k)), list)
        refers = any(isinstance(part, weakref.ref) for part in parts)
        found[id(container)] = container, _Referents(container) if refers else kind(container)
        for part in parts:
            visit(part, depth - 1)

    visit(value, DEPTH)
    return list(found.values())
