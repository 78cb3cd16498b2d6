"""Timelines as Chrome traces, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.cost_model.collectives import collective_of, is_wait, issuer
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.ir.graph import TrainingGraph

_NS = 1e9


class CollectiveIndex:
    """What is issued and waited for in a graph, by the names of nodes."""

    def __init__(self, graph: TrainingGraph) -> None:
        self._kinds: dict[str, str] = {}
        self._axes: dict[str, str] = {}
        self._waits: dict[str, list[str]] = {}
        self._issued: dict[str, float] = {}
        for node in graph.calls():
            collective = collective_of(node)
            if collective is not None:
                self._kinds[node.name] = collective
                self._axes[node.name] = str(node.kwargs.get("group_name", node.args[-1]))
            elif is_wait(node) and (source := issuer(node)) is not None:
                self._waits.setdefault(node.name, []).append(source.name)

    def kind(self, name: str) -> str:
        """The kind of event that a node is on the compute stream."""
        return "wait" if name in self._waits else COMPUTE

    def collective(self, wait: str) -> str:
        """The kind of collective that a wait waits for."""
        return self._kinds[self._waits[wait][0]]

    def landed(self, name: str, start_s: float, end_s: float) -> list[Event]:
        """The collectives that end with this node, which runs from `start_s` to `end_s`."""
        if name in self._kinds:
            self._issued[name] = start_s
        return [
            Event(source, self._axes[source], self._issued[source], end_s, self._kinds[source])
            for source in self._waits.get(name, ())
            if source in self._issued
        ]


def chrome_trace(
    processes: Mapping[str, Sequence[Event]],
    memory: Mapping[str, Iterable[tuple[float, int | Mapping[str, int]]]] | None = None,
) -> dict[str, Any]:
    """The trace of several timelines, one above the other, each in the order that is given.

    Args:
        processes: events of each, by what it is called; those of a stream do not overlap.
        memory: for some of them, bytes over seconds; or bytes of several kinds, by their names.
    """
    rows: list[dict[str, Any]] = []
    for pid, (name, events) in enumerate(processes.items(), 1):  # 0 is the idle one
        rows += _named("process", name, pid)
        streams = sorted({e.stream for e in events}, key=lambda name: (name != COMPUTE, name))
        for tid, stream in enumerate(streams, 1):
            rows += _named("thread", stream, pid, tid)
        rows += [_slice(event, pid, 1 + streams.index(event.stream)) for event in events]
        for at_s, held in (memory or {}).get(name, ()):
            sample = {"name": "memory", "ph": "C", "pid": pid, "ts": round(at_s * _NS) / 1e3}
            args = dict(held) if isinstance(held, Mapping) else {"bytes": held}
            rows.append({**sample, "args": args})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, trace: Mapping[str, Any]) -> None:
    """Writes what `chrome_trace` made."""
    Path(path).write_text(json.dumps(trace))


def _named(kind: str, name: str, pid: int, tid: int = 0) -> list[dict[str, Any]]:
    """What a row is called, and that it comes in the order of its number."""
    own = {"ph": "M", "pid": pid, "tid": tid}
    order = {"name": f"{kind}_sort_index", **own, "args": {"sort_index": tid or pid}}
    return [{"name": f"{kind}_name", **own, "args": {"name": name}}, order]


def _slice(event: Event, pid: int, tid: int) -> dict[str, Any]:
    """A slice, its ends whole nanoseconds: neighbours that touch must not overlap."""
    start, end = round(event.start_s * _NS), round(event.end_s * _NS)
    return {
        "name": event.name,
        "cat": event.kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
    }
