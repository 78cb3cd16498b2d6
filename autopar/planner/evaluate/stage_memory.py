"""`memory_of_rank`: memory of a pipeline rank over its schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.core.ir.aliases import find_storages
from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.roles import (
    Accumulated,
    Gradient,
    Parameter,
    Saved,
    StageInput,
    StageOutput,
    UnreducedGrad,
)
from autopar.core.schedules import ENDS, Action
from autopar.cost_model.memory.growth import Bytes, Parts, parts_of_step
from autopar.cost_model.memory.liveness import CATEGORIES
from autopar.cost_model.simulator.pipeline_transfers import Input
from autopar.cost_model.simulator.step import Simulation

_ROW = {name: row for row, name in enumerate(CATEGORIES)}
_SAVED, _GRADIENTS, _FLYING = _ROW["saved"], _ROW["gradients"], _ROW["in flight"]
_ALWAYS = [_ROW[n] for n in ("parameters", "optimizer", "buffers", "inputs", "gathered")]
_POINTS = 12  # samples of one action's memory


@dataclass(frozen=True, eq=False)
class PhaseMemory:
    """Memory of a forward or backward, without permanent memory."""

    at: NDArray[np.float64]  # progress of the phase from 0 to 1, [points]
    table: Bytes  # [len(CATEGORIES), points]

    @staticmethod
    def of(starts: NDArray[np.float64], table: Bytes) -> PhaseMemory:
        """Samples the maximum of each interval, with and without gradients."""
        span = max(float(np.ptp(starts)), 1e-12) if len(starts) else 1.0
        at = (starts - starts[:1]) / span
        bins = np.minimum((at * _POINTS).astype(int), _POINTS - 1)
        total = table.sum(axis=0)
        # `needs` replaces the gradients, which can move the peak to where the other bytes are most.
        kept = [
            run[size[run].argmax()]
            for size in (total, total - table[_GRADIENTS])
            for run in np.split(np.arange(len(at)), np.flatnonzero(np.diff(bins)) + 1)
            if len(run)
        ]
        chosen = np.unique(np.array(kept, dtype=int))
        return PhaseMemory(at[chosen], table[:, chosen])


@dataclass(frozen=True, eq=False)
class StageMemory:
    """Memory of one micro-batch on a stage, by category.

    Attributes:
        always: permanent bytes, [len(CATEGORIES)].
        update: bytes during the optimizer's step, [len(CATEGORIES)].
        saved: bytes saved between forward and backward.
        summed: bytes of unreduced gradients after the micro-batch.
        largest: bytes of the largest gradient, which is alive while it is added to its sum.
        reads_sums: whether gradient sums of earlier micro-batches are inputs.
        reserved: ratio of the allocator's bytes to tensor bytes.
        split_backward: bytes kept between the two parts of a backward.
        sent: bytes kept alive only by messages, which torch frees at the end of a schedule: those
            to the next stage after the forward and, if the backward reads them, after it, and those
            to the stage before.
        received: bytes that a forward and a backward receive.
    """

    always: Bytes
    forward: PhaseMemory
    backward: PhaseMemory
    update: Bytes
    saved: int
    summed: int
    largest: int
    reads_sums: bool
    reserved: float
    split_backward: int = 0
    sent: tuple[int, int, int] = (0, 0, 0)
    received: tuple[int, int] = (0, 0)

    @staticmethod
    def of(result: Simulation, graph: TrainingGraph, between: int = 0) -> StageMemory:
        memory = result.memory
        always = np.zeros(len(CATEGORIES), dtype=np.int64)
        always[_ALWAYS] = memory.table[_ALWAYS].min(axis=1)
        more = memory.table - always[:, None]
        starts = np.array([at for at, _ in result.memory_curve[:-1]])
        early = starts < result.forward_s
        sizes = [
            tensor_bytes(tensors(node)[0])
            for role, node in zip(graph.outputs, graph.results, strict=True)
            if node is not None
            if isinstance(role, UnreducedGrad)
            or (isinstance(role, Gradient) and isinstance(role.of, Parameter))
        ]
        return StageMemory(
            always,
            PhaseMemory.of(starts[early], more[:, :-1][:, early]),
            PhaseMemory.of(starts[~early], more[:, :-1][:, ~early]),
            more[:, -1],
            int(memory.table[_SAVED, :-1][early].max(initial=0)),
            sum(sizes),
            max(sizes, default=0),
            any(isinstance(role, Accumulated) for role in graph.inputs),
            memory.reserved / max(1, memory.peak),
            between,
            sent_bytes(graph),
            _received(graph),
        )

    def needs(self, action: Action, summed: int) -> PhaseMemory:
        """Memory of an action, with `summed` bytes of gradients of earlier micro-batches."""
        if action.kind == "W":
            rows = np.zeros((len(CATEGORIES), 1), np.int64)
            # With earlier sums, one gradient at a time exists beside them. Without any, all
            # gradients come into being here and stay.
            made = summed + self.largest if summed else self.summed
            rows[[_SAVED, _GRADIENTS], 0] = self.split_backward, made
            return PhaseMemory(np.zeros(1), rows)
        half = self.forward if action.kind == "F" else self.backward
        if action.kind == "I":
            half = self._first_part()
        if not summed or (self.reads_sums and action.kind != "F"):
            return half
        table = half.table.copy()
        table[_GRADIENTS] = summed + np.minimum(table[_GRADIENTS], self.largest)
        return PhaseMemory(half.at, table)

    def _first_part(self) -> PhaseMemory:
        """Memory of the backward without parameter gradients, which keeps their inputs alive."""
        table = self.backward.table.copy()
        used = np.maximum(0, self.saved - table[_SAVED])
        table[_SAVED] += used * self.split_backward // max(1, self.saved)
        if not self.reads_sums:
            table[_GRADIENTS] = 0
        return PhaseMemory(self.backward.at, table)


@dataclass(frozen=True, eq=False)
class RankMemory:
    """Memory of a rank over a step.

    Attributes:
        points: index and progress of the action; the optimizer's step is last.
        table: bytes, [len(CATEGORIES), points].
        reserved: peak bytes that the allocator reserves.
    """

    points: tuple[tuple[int, float], ...]
    table: Bytes
    reserved: int

    @property
    def peak(self) -> int:
        return int(self.table.sum(axis=0).max())

    def parts(self, order: Sequence[Action]) -> Parts:
        """Memory of the parts of a step with one stage and these actions."""
        forward = np.array([order[index].kind == "F" for index, _ in self.points[:-1]])
        return parts_of_step(self.table, forward, np.array([at for _, at in self.points[:-1]]))

    @property
    def by_category(self) -> dict[str, int]:
        most = self.table[:, int(self.table.sum(axis=0).argmax())]
        return {name: int(most[row]) for name, row in _ROW.items()}


def memory_of_rank(
    order: Sequence[Action],
    ahead: Sequence[Sequence[Input]],
    stages: Mapping[int, tuple[StageMemory, StageMemory]],
) -> RankMemory:
    """Memory of a rank from its first action to the optimizer's step.

    At each action there is room for the inputs of later ones that are `ahead`. Each stage has the
    memory of a micro-batch before the last one, and of the last one.
    """
    standing = sum(
        (last.always for _, last in stages.values()), np.zeros(len(CATEGORIES), np.int64)
    )
    flying, halved = Counter[int](), Counter[int]()  # before the backward, and within it
    summed: dict[int, int] = dict.fromkeys(stages, 0)
    final = {action.stage: action for action in order if action.kind != "F"}
    sending = 0
    points: list[tuple[int, float]] = []
    tables: list[Bytes] = []
    # Stages of one rank do not peak together. Adding their peaks gave 506 MiB where 415 are needed.
    for index, action in enumerate(order):
        stage = action.stage
        flying[stage] -= action.kind in ("B", "I")  # its own memory includes them
        halved[stage] -= action.kind == "W"
        more, last = stages[stage]
        half = (last if action == final.get(stage) else more).needs(action, summed[stage])
        base = standing.copy()
        base[_SAVED] += sum(n * stages[s][0].saved for s, n in flying.items())
        base[_SAVED] += sum(n * stages[s][0].split_backward for s, n in halved.items())
        base[_GRADIENTS] += sum(nbytes for s, nbytes in summed.items() if s != stage)
        base[_FLYING] += sending
        base[_FLYING] += sum(stages[s][0].received[kind == "B"] for kind, s in ahead[index])
        points += [(index, float(at)) for at in half.at]
        tables.append(base[:, None] + half.table)
        # neighbours on one rank, as in a V, send each other nothing
        forth, read, back = more.sent
        if stage + 1 not in stages:
            sending += forth * (action.kind == "F") + read * (action.kind in ("B", "I"))
        if stage - 1 not in stages:
            sending += back * (action.kind in ("B", "I"))
        flying[stage] += action.kind == "F"
        halved[stage] += action.kind == "I"
        if action.kind in ENDS:
            summed[stage] = more.summed
    points.append((len(order), 0.0))
    update = sum((last.update for _, last in stages.values()), standing)
    tables.append(update[:, None])
    table = np.concatenate(tables, axis=1)
    over = max(last.reserved for _, last in stages.values())
    return RankMemory(tuple(points), table, round(int(table.sum(axis=0).max()) * over))


def _received(graph: TrainingGraph) -> tuple[int, int]:
    """Bytes that a forward and a backward of a stage receive."""
    sizes = {"forward": 0, "backward": 0}
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        if isinstance(role, StageInput):
            sizes[role.phase] += tensor_bytes(tensors(node)[0])
    return sizes["forward"], sizes["backward"]


def sent_bytes(graph: TrainingGraph) -> tuple[int, int, int]:
    """Bytes sent by a stage: forward values that its backward does not read, others, and gradients.

    A value that a stage received and passes on counts, too.
    """
    storages, behind = find_storages(graph.graph)
    pairs = zip(graph.inputs, graph.placeholders, strict=True)
    standing = {p for r, node in pairs if not isinstance(r, StageInput) for p in behind[node]}
    forth, back, read = set[int](), set[int](), set[int]()
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if isinstance(role, StageOutput) and node is not None:
            (forth if role.phase == "forward" else back).update(behind[node])
    for node in graph.calls():
        if node.meta["phase"] == "backward":
            read.update(place for given in node.all_input_nodes for place in behind[given])

    def nbytes(places: set[int]) -> int:
        return sum(storages[place].nbytes for place in places - standing)

    return nbytes(forth - read), nbytes((forth & read) - back), nbytes(back)


def split_backward_bytes(weights: TrainingGraph, whole: TrainingGraph) -> int:
    """Bytes of a stage's graph kept for the second part of a backward, excluding parameters."""
    names = {role.name for role in weights.inputs if isinstance(role, Saved)}
    storages, behind = find_storages(whole.graph)
    pairs = zip(whole.inputs, whole.placeholders, strict=True)
    there = {p for role, node in pairs if isinstance(role, Parameter) for p in behind[node]}
    held = {p for node in whole.graph.nodes if node.name in names for p in behind[node]}
    return sum(storages[place].nbytes for place in held - there)
