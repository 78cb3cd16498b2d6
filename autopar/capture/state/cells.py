"""`IdentityGuard`: comparison of many Python objects by identity, in loops that run in C."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from operator import contains, getitem, is_
from typing import Any

from autopar.capture.state.contents import (
    Container,
    Found,
    ValuePath,
    copy_of,
    find_containers,
    items,
    referent,
)
from autopar.capture.state.fingerprints import MAX_CONTAINERS


class IdentityGuard:
    """Expected objects of dict items.

    Args:
        cells: pairs of a dict and a key; the key may be absent.
    """

    def __init__(self, cells: Iterable[tuple[dict[Any, Any], Any]]) -> None:
        present: list[tuple[dict[Any, Any], Any]] = []
        absent: list[tuple[dict[Any, Any], Any]] = []
        for cell in cells:
            (present if cell[1] in cell[0] else absent).append(cell)
        self._dicts, self._keys = [c[0] for c in present], [c[1] for c in present]
        self._objects = [values[key] for values, key in present]
        self._absent_dicts, self._absent_keys = [c[0] for c in absent], [c[1] for c in absent]
        self._index = {(id(values), key): index for index, (values, key) in enumerate(present)}

    def holds(self) -> bool:
        """Whether every item is the same object, and absent keys are still absent."""
        try:
            found = map(getitem, self._dicts, self._keys)
            return all(map(is_, found, self._objects)) and not any(
                map(contains, self._absent_dicts, self._absent_keys)
            )
        except KeyError:
            return False

    def expect(self, values: Any, key: str, value: Any) -> None:
        """Replaces the expected object of an item."""
        if (index := self._index.get((id(values), key))) is not None:
            self._objects[index] = value


class _Referents(list[tuple[Any, Any]]):
    """Keys and values of a container, with weak references replaced by their targets."""

    def __init__(self, container: Container) -> None:
        super().__init__((key, referent(value)) for key, value in items(container))


def unchanged(container: Any, copy: Any) -> bool:
    """Whether a container has the same items, by identity, as a copy from `containers_in`."""
    if isinstance(container, set):
        return bool(container == copy)
    if len(container) != len(copy):
        return False
    if isinstance(copy, _Referents):
        pairs = zip(_Referents(container), copy, strict=True)
        return all(key == known and value is old for (key, value), (known, old) in pairs)
    if isinstance(container, dict):
        return all(map(is_, container.values(), copy.values())) and list(container) == list(copy)
    return all(map(is_, container, copy))


def containers_in(value: Any) -> list[tuple[Container, Any]]:
    """Every container reachable from a value, with a copy of its items."""
    found: Found = {}
    find_containers(value, ValuePath(""), found, MAX_CONTAINERS)
    return [(container, _copy(container)) for container, _ in found.values()]


def _copy(container: Container) -> Any:
    refers = any(isinstance(value, weakref.ref) for _, value in items(container))
    return _Referents(container) if refers else copy_of(container)
