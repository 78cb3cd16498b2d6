"""Timelines as Chrome traces, for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.core.common.documents import write_text
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import collective_of, is_wait, issuer
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.errors import StrategyError

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


@dataclass(frozen=True, eq=False)
class Slice:
    """An interval on a row of a trace.

    Attributes:
        group: name of the group of rows, such as a rank.
        row: name of the row; its slices do not overlap.
        args: further figures, shown when the slice is selected.
    """

    group: str
    row: str
    name: str
    start_s: float
    end_s: float
    kind: str
    args: Mapping[str, object] = field(default_factory=dict)


Flow = tuple[Slice, Slice]
"""An arrow between two slices."""

Bytes = int | Mapping[str, int]


def slices_of(group: str, events: Iterable[Event]) -> list[Slice]:
    """Slices of a timeline, one row a stream; those of compute come first."""
    ordered = sorted(events, key=lambda e: (e.stream != COMPUTE, e.stream))
    return [Slice(group, e.stream, e.name, e.start_s, e.end_s, e.kind) for e in ordered]


def waited(slices: Sequence[Slice], collective_of_wait: Mapping[str, str]) -> Iterator[Flow]:
    """Flows from collectives to their waits, among slices of one run of a program.

    Slices have the names of nodes, or these as the argument "node".
    """

    def node(item: Slice) -> str:
        return str(item.args.get("node", item.name))

    sources = {node(item): item for item in slices if item.kind not in (COMPUTE, "wait")}
    for wait in slices:
        source = sources.get(collective_of_wait.get(node(wait), ""))
        if wait.kind == "wait" and source is not None:
            yield source, wait


def chrome_trace(
    slices: Iterable[Slice],
    memory: Mapping[str, Iterable[tuple[float, Bytes]]] | None = None,
    flows: Iterable[Flow] = (),
) -> dict[str, Any]:
    """A trace of groups of rows, both in the order of their first slice.

    Args:
        slices: the intervals.
        memory: (seconds, bytes) by group; bytes may be split by category.
        flows: arrows between slices.
    """
    slices = list(slices)
    groups = {name: pid for pid, name in enumerate(_names(slices, memory), 1)}  # 0 is idle
    threads: dict[tuple[str, str], int] = {}
    rows = [row for name, pid in groups.items() for row in _label("process", name, pid)]

    def place(item: Slice) -> dict[str, int]:
        key = item.group, item.row
        if key not in threads:
            threads[key] = 1 + sum(group == item.group for group, _ in threads)
            rows.extend(_label("thread", item.row, groups[item.group], threads[key]))
        return {"pid": groups[item.group], "tid": threads[key]}

    for item in slices:
        # Ends in whole nanoseconds: adjacent slices must not overlap.
        start, end = round(item.start_s * _NS), round(item.end_s * _NS)
        span = {"ts": start / 1e3, "dur": (end - start) / 1e3, "args": dict(item.args)}
        rows.append({"name": item.name, "cat": item.kind, "ph": "X", **place(item), **span})
    for number, (source, target) in enumerate(flows, 1):
        arrow = {"name": source.kind, "cat": "flow", "id": number}
        begin, end = round(source.start_s * _NS), round(target.start_s * _NS)
        rows.append({**arrow, "ph": "s", **place(source), "ts": begin / 1e3})
        rows.append({**arrow, "ph": "f", "bp": "e", **place(target), "ts": max(begin, end) / 1e3})
    for name, samples in (memory or {}).items():
        for at_s, nbytes in samples:
            args = dict(nbytes) if isinstance(nbytes, Mapping) else {"bytes": nbytes}
            sample = {"name": "memory", "ph": "C", "pid": groups[name]}
            rows.append({**sample, "ts": round(at_s * _NS) / 1e3, "args": args})
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, trace: Mapping[str, Any]) -> None:
    """Writes a trace of `chrome_trace` as JSON.

    Raises:
        StrategyError: the file cannot be written.
    """
    write_text(path, json.dumps(trace), StrategyError)


def _names(slices: Iterable[Slice], memory: Mapping[str, object] | None) -> dict[str, None]:
    return dict.fromkeys([*(item.group for item in slices), *(memory or {})])


def _label(kind: str, name: str, pid: int, tid: int = 0) -> list[dict[str, Any]]:
    """Metadata that names a row and sorts rows by number."""
    row = {"ph": "M", "pid": pid, "tid": tid}
    order = {"name": f"{kind}_sort_index", **row, "args": {"sort_index": tid or pid}}
    return [{"name": f"{kind}_name", **row, "args": {"name": name}}, order]
