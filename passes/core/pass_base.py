"""`Pass`: a frozen dataclass, called on a graph, that returns a `PassResult`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from autopar.ir.graph import GraphProperty, TrainingGraph


@dataclass(frozen=True)
class PassResult:
    """The result of a pass.

    Attributes:
        graph: the new graph; the old one if the pass declined.
        reason: why the pass declined, "" if it changed something.
    """

    graph: TrainingGraph
    reason: str = ""

    @property
    def modified(self) -> bool:
        """Whether the pass changed anything."""
        return not self.reason


class Pass(ABC):
    """A graph transformation: a frozen dataclass whose fields are its options.

    Attributes:
        tier: "exact" passes change nothing but the order of sums, "lossy" ones change numerics.
        requires: properties that the graph must have before.
        ensures: properties that the graph has after, also where the pass declines.
    """

    tier: ClassVar[Literal["exact", "lossy"]] = "exact"
    requires: ClassVar[frozenset[GraphProperty]] = frozenset()
    ensures: ClassVar[frozenset[GraphProperty]] = frozenset()

    @abstractmethod
    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""


def pass_name(item: Pass | type[Pass]) -> str:
    """The name of a pass: its class in snake_case, as its file is called."""
    kind = item if isinstance(item, type) else type(item)
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def shortened(value: object) -> str:
    """The text of an option, its beginning and length if it has more than 400 characters."""
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:80]}... ({len(text)} characters)"


def describe(item: Pass, show: Callable[[object], str] = shortened) -> str:
    """A pass and its options, each as `show` prints it, as one line."""
    options = (f"{f.name}={show(getattr(item, f.name))}" for f in fields(item))  # type: ignore[arg-type]
    return f"{pass_name(item)}({', '.join(options)})"


def known_passes() -> dict[str, type[Pass]]:
    """Every pass whose module is imported, by name."""
    found: dict[str, type[Pass]] = {}
    pending = [*Pass.__subclasses__()]
    for kind in pending:
        found.setdefault(pass_name(kind), kind)
        pending += kind.__subclasses__()
    return found
