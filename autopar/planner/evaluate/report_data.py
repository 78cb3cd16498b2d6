"""`report_data_of`: data of the HTML report from a simulated step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.messages import collective_of, is_wait, issuer
from autopar.core.ir.roles import StageOutput
from autopar.core.plan.report_data import (
    MOST_POINTS,
    CollectiveCall,
    ReportData,
    Span,
    StageProgram,
    Traffic,
)
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.cost import Cost
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.memory.liveness import CATEGORIES
from autopar.cost_model.simulator.step import Simulation
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.passes.core.node_builder import ancestors
from autopar.planner.evaluate.setup import timeline_events

_SHAPES = 4  # maximum number of shapes named of a node
_STEPS = 24  # points of a drawn curve over message sizes, less one
Bytes = NDArray[np.int64]


def report_data_of(graph: TrainingGraph, cluster: Cluster, result: Simulation) -> ReportData:
    """Report data of the simulated step of a lowered graph, without pipeline stages."""
    times = [at for at, _ in result.memory_curve]
    memory_s, memory = sample_memory(np.array(times), result.memory.table)
    sent, spans = Counter(transfers(graph, cluster)), _spans(graph, result)
    return ReportData(
        cluster.ranks_per_node,
        spans,
        memory_s,
        memory,
        traffic(sent, cluster),
        collective_calls(graph, cluster),
    )


def transfers(graph: TrainingGraph, cluster: Cluster) -> Iterable[Transfer]:
    """Collectives of a lowered graph, in the order of issue."""
    for node in graph.calls():
        if collective_of(node) is not None:
            yield Transfer.of(node, graph.axes, cluster.ranks_per_node)


def collective_calls(graph: TrainingGraph, cluster: Cluster) -> tuple[CollectiveCall, ...]:
    """Collectives of a lowered graph that a node waits for, in the order of the waits."""
    found = []
    for wait in filter(is_wait, graph.calls()):
        if (node := issuer(wait)) is not None:
            nbytes = Transfer.of(node, graph.axes, cluster.ranks_per_node).nbytes
            block, shapes = node.meta.get("block") or "", _shapes(node)
            found.append(CollectiveCall(node.name, wait.name, block, nbytes, shapes))
    return tuple({call.name: call for call in found}.values())


def stage_program(
    stages: Sequence[int], graph: TrainingGraph, result: Simulation, cluster: Cluster, kinds: str
) -> StageProgram:
    """Program of a micro-batch of equal stages, with the given kinds of actions."""
    results = dict(zip(graph.outputs, graph.results, strict=True))
    sent, returned = (
        [n for role, n in results.items() if n is not None and _is_sent(role, phase)]
        for phase in ("forward", "backward")
    )
    events, turn_s = [e for e in result.timeline if e.seconds > 0.0], result.forward_s
    backward = [
        replace(e, start_s=e.start_s - turn_s, end_s=e.end_s - turn_s)
        for e in events
        if e.start_s >= turn_s
    ]
    inputs = {node.name for node in ancestors(returned)}
    parts = {
        "F": [e for e in events if e.start_s < turn_s],
        "B": backward,
        "I": _packed([e for e in backward if e.stream != COMPUTE or e.name in inputs]),
        "W": _packed([e for e in backward if e.stream == COMPUTE and e.name not in inputs]),
    }
    return StageProgram(
        stages=tuple(stages),
        actions=tuple(
            (kind, round(max(event.end_s for event in own), 8), timeline_events(own))
            for kind, own in parts.items()
            if kind in kinds and own
        ),
        calls=collective_calls(graph, cluster),
        sent=", ".join(map(_shape, sent)),
        returned=", ".join(map(_shape, returned)),
    )


def _is_sent(role: object, phase: str) -> bool:
    return isinstance(role, StageOutput) and role.phase == phase


def _packed(events: Sequence[Event]) -> list[Event]:
    """Events without the time in which none of them computes."""
    spans = np.array(sorted((e.start_s, e.end_s) for e in events if e.stream == COMPUTE))
    if not len(spans):
        return []
    lengths = spans[:, 1] - spans[:, 0]
    ends = lengths.cumsum()
    passed = np.column_stack([ends - lengths, ends]).ravel()

    def at(time_s: float) -> float:
        return float(np.interp(time_s, spans.ravel(), passed))

    return [replace(e, start_s=at(e.start_s), end_s=at(e.end_s)) for e in events]


def _shapes(node: fx.Node) -> str:
    """Text of the tensors that a collective reads and returns."""
    given = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    read = ", ".join(_shape(each) for each in given if isinstance(each, fx.Node))
    return f"{read} to {_shape(node)}" if collective_of(node) != "all_reduce" else read


def _shape(node: fx.Node) -> str:
    """Text of the tensors of a node, of many the first ones."""
    found = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors(node)]
    more = f" and {len(found) - _SHAPES} more" if len(found) > _SHAPES else ""
    return ", ".join(found[:_SHAPES]) + more


def traffic(sent: Mapping[Transfer, int], cluster: Cluster) -> tuple[Traffic, ...]:
    """Messages of a step by axis and collective, with the cost curve of each kind."""

    def kind(item: Transfer) -> tuple[str, str, str, str]:
        return item.axis, item.collective, str(item.shape), item.dtype

    real = sorted((t for t in sent if t.nbytes and t.shape.ranks > 1), key=kind)
    return tuple(_traffic(list(items), sent, cluster) for _, items in groupby(real, kind))


def _traffic(items: Sequence[Transfer], sent: Mapping[Transfer, int], cluster: Cluster) -> Traffic:
    one, sizes = items[0], sorted({item.nbytes * item.pieces for item in items})
    key = CurveKey(one.collective, one.shape, one.dtype)
    entry = cluster.curves.get(key)
    points = list(zip(entry.curve.bytes, entry.curve.seconds, strict=True)) if entry else []
    ends = [*sizes, *(size for size, _ in points)]

    def cost(nbytes: int) -> Cost:
        return cluster.seconds(one.collective, nbytes, one.shape, one.dtype)

    costs = [(n, cost(n)) for n in _steps(min(ends), max(ends))]
    counts = Counter[int]()
    for item in items:
        counts[item.nbytes * item.pieces] += sent[item]
    return Traffic(
        one.collective,
        one.axis,
        str(one.shape),
        one.dtype,
        cost(sizes[-1]).provenance,
        measured=tuple((n, _figures(s)) for n, s in points),
        modelled=tuple((n, _figures(c.seconds), _figures(c.error, 3)) for n, c in costs),
        sent=tuple((n, counts[n], _figures(cost(n).seconds)) for n in sizes),
    )


def _steps(least: int, most: int) -> list[int]:
    """Sizes from `least` to `most`, evenly spaced in the logarithm."""
    if least == most:
        least, most = max(1, least // 8), most * 8
    ratio = math.log(most / least)
    return sorted({round(least * math.exp(ratio * i / _STEPS)) for i in range(_STEPS + 1)})


def _figures(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits}g}")


def _spans(graph: TrainingGraph, result: Simulation) -> tuple[Span, ...]:
    """Spans of consecutive operators of the same block and phase."""
    starts = dict(zip(result.memory.nodes, (at for at, _ in result.memory_curve), strict=True))
    ends = [*list(starts.values())[1:], result.step_s]
    owners = [(node.meta.get("block") or "", node.meta["phase"]) for node in graph.calls()]
    rows = zip(owners, starts.values(), ends, strict=False)
    found = []
    for (block, phase), run in groupby(rows, key=lambda row: row[0]):
        own = list(run)
        if own[-1][2] > own[0][1]:
            found.append((block, phase, round(own[0][1], 8), round(own[-1][2], 8)))
    return tuple(found)


def sample_memory(
    times: NDArray[np.float64], table: Bytes
) -> tuple[tuple[float, ...], tuple[tuple[str, tuple[int, ...]], ...]]:
    """Samples a memory curve at the maximum of each interval: times, and bytes by category.

    Args:
        times: ascending times in seconds, [points].
        table: bytes, [len(CATEGORIES), points].
    """
    total = table.sum(axis=0)
    place = np.floor(times / max(times[-1], 1e-12) * (MOST_POINTS - 1)).astype(int)
    first = np.flatnonzero(np.diff(place, prepend=-1))
    runs = np.split(np.arange(len(times)), first[1:])
    kept = np.array([run[total[run].argmax()] for run in runs])
    rows = {name: table[row, kept] for row, name in enumerate(CATEGORIES)}
    memory = tuple((name, tuple(row.tolist())) for name, row in rows.items() if row.any())
    return tuple(round(float(at), 8) for at in times[kept]), memory
