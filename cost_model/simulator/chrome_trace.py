"""Timelines as Chrome traces, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

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
    """Collectives and waits of a graph, by the names of their nodes."""

    def __init__(self, graph: TrainingGraph) -> None:
        self._kinds: dict[str, str] = {}
        self._axes: dict[str, str] = {}
        self._waits: dict[str, str] = {}
        self._issued: dict[str, float] = {}
        for node in graph.calls():
            collective = collective_of(node)
            if collective is not None:
                self._kinds[node.name] = collective
                self._axes[node.name] = str(node.kwargs.get("group_name", node.args[-1]))
            elif is_wait(node) and (source := issuer(node)) is not None:
                self._waits[node.name] = source.name

    def kind(self, name: str) -> str:
        return "wait" if name in self._waits else COMPUTE

    def collective(self, wait: str) -> str:
        return self._kinds[self._waits[wait]]

    def landed(self, name: str, start_s: float, end_s: float) -> list[Event]:
        """The collectives that end with this node, which runs from `start_s` to `end_s`."""
        if name in self._kinds:
            self._issued[name] = start_s
        source = self._waits.get(name, "")
        if source not in self._issued:
            return []
        axis, kind = self._axes[source], self._kinds[source]
        return [Event(source, axis, self._issued[source], end_s, kind)]


def chrome_trace(
    processes: Mapping[str, Sequence[Event]],
    memory: Mapping[str, Iterable[tuple[float, int | Mapping[str, int]]]] | None = None,
) -> dict[str, Any]:
    """A trace of several timelines, one above the other, in the order given.

    Args:
        processes: events by the name of their timeline; events of a stream do not overlap.
        memory: (seconds, bytes) by the name of the timeline; bytes may be split by category.
    """
    rows: list[dict[str, Any]] = []
    for pid, (name, events) in enumerate(processes.items(), 1):  # 0 is the idle process
        rows += _label("process", name, pid)
        streams = sorted({e.stream for e in events}, key=lambda name: (name != COMPUTE, name))
        for tid, stream in enumerate(streams, 1):
            rows += _label("thread", stream, pid, tid)
        for event in events:
            # Ends in whole nanoseconds: adjacent slices must not overlap.
            start, end = round(event.start_s * _NS), round(event.end_s * _NS)
            place = {"ph": "X", "pid": pid, "tid": 1 + streams.index(event.stream)}
            span = {"ts": start / 1e3, "dur": (end - start) / 1e3}
            rows.append({"name": event.name, "cat": event.kind, **place, **span})
        for at_s, nbytes in (memory or {}).get(name, ()):
            sample = {"name": "memory", "ph": "C", "pid": pid, "ts": round(at_s * _NS) / 1e3}
            args = dict(nbytes) if isinstance(nbytes, Mapping) else {"bytes": nbytes}
            rows.append({**sample, "args": args})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, trace: Mapping[str, Any]) -> None:
    """Writes a trace of `chrome_trace` as JSON."""
    Path(path).write_text(json.dumps(trace))


def _label(kind: str, name: str, pid: int, tid: int = 0) -> list[dict[str, Any]]:
    """Metadata that names a row and sorts rows by number."""
    row = {"ph": "M", "pid": pid, "tid": tid}
    order = {"name": f"{kind}_sort_index", **row, "args": {"sort_index": tid or pid}}
    return [{"name": f"{kind}_name", **row, "args": {"name": name}}, order]
