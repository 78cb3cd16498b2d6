"""`CollectiveLog`: the last waits of this process for other ranks, in a ring buffer."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

from torch import fx

from autopar.core.ir.graph import source_line
from autopar.passes.core.collective_ops import WAIT_LOWERED

MAX_WAITS = 256
"""Waits that the ring buffer holds."""


class Wait(NamedTuple):
    """A finished wait.

    Attributes:
        what: the collective, its mesh axis and the user's line.
        start: seconds of `time.perf_counter` at which this rank began to wait.
        end: seconds at which the wait was over.
    """

    what: str
    start: float
    end: float


@dataclass
class CollectiveLog:
    """Waits of this process for other ranks.

    Attributes:
        waited_s: seconds of all waits so far.
        num_waits: number of all waits so far.
        waits: the last `MAX_WAITS` waits, the oldest first.
        current: (what, start) of the wait in progress.
        work: (what, start) of long work of autopar's own, for which other ranks may wait.
    """

    waited_s: float = 0.0
    num_waits: int = 0
    waits: deque[Wait] = field(default_factory=lambda: deque(maxlen=MAX_WAITS))
    current: tuple[str, float] | None = None
    work: tuple[str, float] | None = None

    def start(self, what: str) -> None:
        self.current = what, perf_counter()

    def finish(self) -> None:
        """Ends the wait in progress; after a failed one, it stays for the error's text."""
        end = perf_counter()
        if self.current is not None:
            what, start = self.current
            self.waited_s += end - start
            self.num_waits += 1
            self.waits.append(Wait(what, start, end))
            self.current = None

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        self.start(what)
        # No finally: a wait that failed stays current, for the error's text.
        yield
        self.finish()

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Says that this rank does long work, such as planning."""
        self.work = what, perf_counter()
        try:
            yield
        finally:
            self.work = None

    @contextlib.contextmanager
    def busy(self, then: str) -> Iterator[None]:
        """Ends the wait in progress for some work, and starts to wait in `then` after it."""
        self.finish()
        yield
        self.start(then)


LOG = CollectiveLog()
"""The waits of this process."""


def wait_logged(tensor: Any, what: str) -> Any:
    """`wait_tensor` that the log sees."""
    LOG.start(what)
    result = WAIT_LOWERED(tensor)
    LOG.finish()
    return result


def log_waits(graph: fx.Graph, axes: dict[fx.Node, str]) -> None:
    """Replaces the waits of a graph on a host by logged ones, in place.

    Args:
        graph: lowered graph.
        axes: name of the mesh axis of each collective.
    """
    for node in graph.find_nodes(op="call_function", target=WAIT_LOWERED):
        start = node.args[0]
        while isinstance(start, fx.Node) and start.args and start not in axes:
            start = start.args[0]
        if isinstance(start, fx.Node):
            # a placeholder is a collective that another function has begun
            what = describe(start, axes[start]) if start in axes else f"{start.name}, begun ahead"
            node.target, node.args = wait_logged, (node.args[0], what)


def describe(node: fx.Node, axis: str) -> str:
    """The collective of a node, its mesh axis, and the user's line or the block it serves."""
    name = str(node.target).split(".")[1].removesuffix("_")
    where = source_line(node) or str(node.meta.get("block") or "")
    return f"{name} over {axis}" + (f", {where}" if where else f" ({node.name})")
