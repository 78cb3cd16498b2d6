"""The memory of a rank of a pipeline: several stages, each with several micro-batches in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.liveness import CATEGORIES
from autopar.cost_model.memory import Memory
from autopar.graph import Accumulated, Gradient, Parameter, TrainingGraph, tensor_bytes, tensors

Bytes = NDArray[np.int64]
_ROW = {name: row for row, name in enumerate(CATEGORIES)}
_ALWAYS = [_ROW[name] for name in ("parameters", "optimizer", "buffers", "inputs")]


@dataclass(frozen=True, eq=False)
class StageMemory:
    """What one micro-batch needs on a stage, by category.

    Attributes:
        always: what exists all the time.
        peak: what comes to it when most exists.
        update: what comes to it while the optimizer steps.
        saved: bytes that are kept between forward and backward.
        kept: bytes of gradients that micro-batches are added up in, beside their own.
        reserved: by which the allocator's bytes are more than those of tensors.
    """

    always: Bytes
    peak: Bytes
    update: Bytes
    saved: int
    kept: int
    reserved: float

    @staticmethod
    def of(memory: Memory, graph: TrainingGraph, micro_batches: int) -> StageMemory:
        """From the simulated memory of a step of one micro-batch."""
        always = np.zeros(len(CATEGORIES), dtype=np.int64)
        always[_ALWAYS] = memory.table[_ALWAYS].min(axis=1)
        more = memory.table - always[:, None]
        added = {r.name for r in graph.inputs if isinstance(r, Accumulated)}
        pairs = zip(graph.outputs, graph.results, strict=True)
        kept = sum(
            tensor_bytes(tensors(node)[0])
            for role, node in pairs
            if isinstance(role, Gradient) and node is not None
            if isinstance(role.of, Parameter) and role.of.name not in added
        )
        return StageMemory(
            always,
            more[:, int(more.sum(axis=0).argmax())],
            more[:, -1],
            int(memory.table[_ROW["saved"]].max()),
            kept if micro_batches > 1 else 0,
            memory.reserved / max(1, memory.peak),
        )


@dataclass(frozen=True)
class RankMemory:
    """The most bytes that a rank needs.

    Attributes:
        peak: of tensors.
        by_category: the same in parts.
        reserved: what the allocator takes for them.
    """

    peak: int
    by_category: dict[str, int]
    reserved: int


def memory_of_rank(stages: Sequence[tuple[StageMemory, StageMemory, int]]) -> RankMemory:
    """The peak over the micro-batches of a rank's stages, and over the optimizer's step.

    Args:
        stages: of each, a micro-batch before the last, the last one, and how many are in flight.
    """
    standing = sum((last.always for _, last, _ in stages), np.zeros(len(CATEGORIES), np.int64))
    added = sum(last.kept for _, last, _ in stages)
    points = [standing + sum(last.update for _, last, _ in stages)]
    for active, (more, last, flights) in enumerate(stages):
        others = [item for place, item in enumerate(stages) if place != active]
        for one, own, beside in (
            (more, flights - 1, sum(n * m.saved for m, _, n in others)),
            (last, 0, sum(m.saved for m, _, _ in others)),
        ):
            point = standing + one.peak
            point[_ROW["saved"]] += own * more.saved + beside
            point[_ROW["gradients"]] += added
            points.append(point)
    most = max(points, key=lambda point: int(point.sum()))
    peak = int(most.sum())
    over = max(last.reserved for _, last, _ in stages)
    parts = {name: int(most[row]) for name, row in _ROW.items()}
    return RankMemory(peak, parts, round(peak * over))
