"""`Picture`s of pipelines: the memory of a rank over its schedule, and what all of it sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.liveness import CATEGORIES
from autopar.cost_model.schedules import ENDS, Action
from autopar.cost_model.simulate import Simulation
from autopar.cost_model.streams import Event
from autopar.graph import TrainingGraph
from autopar.picture import Picture
from autopar.planner.pictures import Bytes, thinned, traffic, transfers
from autopar.planner.stage_memory import StageMemory

_SAVED = CATEGORIES.index("saved")
_GRADIENTS = CATEGORIES.index("gradients")
_POINTS = 12  # of the memory of one action

Columns = list[tuple[float, Bytes]]
"""Bytes of each category from points of time on."""


@dataclass(frozen=True)
class Held:
    """What a stage holds while a micro-batch is on it, and after that.

    Attributes:
        last: its last micro-batch, simulated.
        more: a micro-batch before that.
        ending: the memory of the last.
        memory: the memory of the others.
    """

    last: Simulation
    more: Simulation
    ending: StageMemory
    memory: StageMemory


def memory_of_schedule(
    actions: Sequence[tuple[Action, Event]], stages: dict[int, Held], end_s: float
) -> Columns:
    """The bytes of a rank over its schedule, the optimizer's step as the last point.

    Args:
        actions: what the rank does, and when.
        stages: those that it runs.
        end_s: when the optimizer steps.
    """
    zero = np.zeros(len(CATEGORIES), np.int64)
    standing = sum((own.ending.always for own in stages.values()), zero)
    standing[_GRADIENTS] += sum(own.ending.kept for own in stages.values())
    flying: Counter[int] = Counter()
    last = {action.stage: action for action, _ in actions if action.kind != "F"}
    found: Columns = []
    for action, event in actions:
        held = stages[action.stage]
        flying[action.stage] -= action.kind != "F"  # what it reads is in its own columns
        base = standing.copy()
        base[_SAVED] += sum(n * stages[s].memory.saved for s, n in flying.items())
        own = held.last if action == last[action.stage] else held.more
        always = held.ending.always if own is held.last else held.memory.always
        found += [(at, base + column - always) for at, column in _columns(action, event, own)]
        flying[action.stage] += action.kind not in ENDS
        after = standing.copy()
        after[_SAVED] += sum(n * stages[s].memory.saved for s, n in flying.items())
        found.append((event.end_s, after))
    update = standing + sum((own.ending.update for own in stages.values()), zero)
    update[_GRADIENTS] -= sum(own.ending.kept for own in stages.values())
    return [*found, (end_s, update)]


def _columns(action: Action, event: Event, result: Simulation) -> Columns:
    """The memory of one action, stretched to when it runs: of each short while, the most."""
    times = np.array([at for at, _ in result.memory_curve[:-1]])
    ahead = times < result.forward_s
    inside = np.flatnonzero(ahead if action.kind == "F" else ~ahead)
    if action.kind == "W" or not len(inside):
        inside = inside[-1:]
    if not len(inside):
        return []
    table, own = result.memory.table[:, inside], times[inside]
    span = max(own[-1] - own[0], 1e-12)
    place = np.floor((own - own[0]) / span * (_POINTS - 1)).astype(int)
    starts = event.start_s + (own - own[0]) / span * event.seconds * (1 - 1e-6)
    total: NDArray[np.int64] = table.sum(axis=0)
    runs = (np.flatnonzero(place == bin) for bin in range(_POINTS))
    most = (run[total[run].argmax()] for run in runs if len(run))
    return [(float(starts[at]), table[:, at]) for at in most]


def picture_of_pipeline(
    cluster: Cluster,
    columns: Columns,
    lowered: Iterable[tuple[TrainingGraph, int]],
    messages: Counter[Transfer],
) -> Picture:
    """The picture of a pipeline.

    Args:
        cluster: that it was priced on.
        columns: the memory of the rank that needs most.
        lowered: the graphs that the rank that computes most runs, and how often.
        messages: what it sends to its neighbours.
    """
    sent = Counter(messages)
    for graph, times in lowered:
        for item in transfers(graph, cluster):
            sent[item] += times
    columns = sorted(columns, key=lambda point: point[0])
    starts = np.array([at for at, _ in columns])
    memory_s, memory = thinned(starts, np.stack([column for _, column in columns], axis=1))
    return Picture(cluster.ranks_per_node, (), memory_s, memory, traffic(sent, cluster))
