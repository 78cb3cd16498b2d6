"""`Pass`: a frozen dataclass, called on a graph, that returns a `PassResult`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from autopar.core.ir.graph import GraphProperty, TrainingGraph


@dataclass(frozen=True)
class PassResult:
    """The new graph, or the old one with the reason for which the pass declined."""

    graph: TrainingGraph
    reason: str = ""


class Pass(ABC):
    """A graph transformation: a frozen dataclass whose fields are its options.

    Attributes:
        tier: "exact" if results change at most by the order of sums, else "lossy".
        requires: properties that the graph must have before the pass.
        ensures: properties that the graph has after the pass, even if the pass declines.
    """

    tier: ClassVar[Literal["exact", "lossy"]] = "exact"
    requires: ClassVar[frozenset[GraphProperty]] = frozenset()
    ensures: ClassVar[frozenset[GraphProperty]] = frozenset()

    @abstractmethod
    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""


def pass_name(item: Pass | type[Pass]) -> str:
    """Name of a pass: its class name in snake_case, equal to its file name."""
    kind = item if isinstance(item, type) else type(item)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def shortened(value: object) -> str:
    """Representation of an option; beyond 400 characters, its beginning and length."""
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:80]}... ({len(text)} characters)"


def describe(item: Pass, show: Callable[[object], str] = shortened) -> str:
    """One-line text of a pass and its options, each option printed by `show`."""
    options = (f"{f.name}={show(getattr(item, f.name))}" for f in fields(item))  # type: ignore[arg-type]
    return f"{pass_name(item)}({', '.join(options)})"


def known_passes() -> dict[str, type[Pass]]:
    """Classes of all passes in imported modules, by pass name."""
    found: dict[str, type[Pass]] = {}
    pending = [*Pass.__subclasses__()]
    for kind in pending:
        found.setdefault(pass_name(kind), kind)
        pending += kind.__subclasses__()
    return found
