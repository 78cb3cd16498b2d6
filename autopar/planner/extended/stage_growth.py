"""`grown_stage`: figures of a pipeline stage with more blocks. `mixed`: of blocks of several kinds.

Every block adds the same seconds and bytes to its stage. So a stage with two blocks and one with
three give the figures of a stage with any number of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.cost_model.memory.growth import BUCKETED, REACH, Bytes, PartMemory, grown_peak
from autopar.cost_model.memory.host_memory import HostMemory
from autopar.cost_model.memory.liveness import CATEGORIES
from autopar.cost_model.simulator.pipeline import StageCost
from autopar.planner.evaluate.stage_figures import StageFigures
from autopar.planner.evaluate.stage_memory import PhaseMemory, StageMemory
from autopar.planner.extended.extended_evaluator import GROWN_GAPS

Changes = dict[str, Any]
"""New values of a dataclass's fields, by name."""

TIMES = ("forward_s", "backward_s", "input_s", "weight_s", "first_s", "last_s")
"""Fields of a `StageCost` that grow with its blocks; its messages do not."""

FIGURES = ("compute_s", "within_s", "exposed_s", "node_bytes")
TABLES = ("waits", "causes", "provenance")
ARRAYS = ("always", "update")
BYTES = ("saved", "summed", "split_backward")


def grown_stage(
    few: StageFigures, more: StageFigures, count: int, zero_stage: int, bucket_bytes: int
) -> StageFigures:
    """A stage with `count` blocks more, or fewer if it is negative.

    Args:
        few: the stage as it was simulated.
        more: the same with one block more.
        count: number of blocks to add.
        zero_stage: ZeRO stage of the blocks.
        bucket_bytes: most bytes of all buckets at one moment.
    """
    standing, saved = (
        round(_line(getattr(few.host, name), getattr(more.host, name), count))
        for name in ("standing", "saved")
    )
    changes: Changes = {
        name: _line(getattr(few, name), getattr(more, name), count) for name in FIGURES
    } | {name: _grown_table(getattr(few, name), getattr(more, name), count) for name in TABLES}
    first, last = (
        _grown_memory(*pair, count, zero_stage, bucket_bytes, on_gpu=few.context_bytes > 0)
        for pair in zip(few.memory, more.memory, strict=True)
    )
    return replace(
        few,
        cost=grown_cost(few.cost, more.cost, count),
        memory=(first, last),
        exposures=(),  # of blocks that stand for others
        host=HostMemory(standing, saved),
        **changes,
    )


def grown_cost(few: StageCost, more: StageCost, count: int) -> StageCost:
    """The cost of a stage with `count` blocks more."""
    times: Changes = {name: _line(getattr(few, name), getattr(more, name), count) for name in TIMES}
    return replace(few, **times)


def mixed(parts: Sequence[tuple[float, StageFigures]]) -> StageFigures:
    """A stage whose blocks are configured differently: figures of each kind, with its share."""
    (_, first), *others = parts
    if not others:
        return first
    earlier, last = (
        _mixed_memory([(share, each.memory[index]) for share, each in parts]) for index in (0, 1)
    )
    changes: Changes = {
        name: sum(s * getattr(each, name) for s, each in parts) for name in FIGURES
    } | {name: mixed_table([(s, getattr(each, name)) for s, each in parts]) for name in TABLES}
    host = (
        round(sum(s * getattr(each.host, name) for s, each in parts))
        for name in ("standing", "saved")
    )
    return replace(
        first,
        cost=mixed_cost([(share, each.cost) for share, each in parts]),
        memory=(earlier, last),
        host=HostMemory(*host),
        **changes,
    )


def mixed_cost(parts: Sequence[tuple[float, StageCost]]) -> StageCost:
    """The cost of a stage whose blocks are configured differently."""
    times: Changes = {
        name: sum(share * getattr(each, name) for share, each in parts) for name in TIMES
    }
    return replace(parts[0][1], **times)


def mixed_table(parts: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """The sum of tables, each multiplied by its share."""
    keys = dict.fromkeys(key for _, table in parts for key in table)
    return {key: sum(share * table.get(key, 0.0) for share, table in parts) for key in keys}


def _line(few: float, more: float, count: int) -> float:
    return max(0.0, few + count * (more - few))


def _grown_table(
    few: Mapping[str, float], more: Mapping[str, float], count: int
) -> dict[str, float]:
    keys = dict.fromkeys((*few, *more))
    return {key: _line(few.get(key, 0), more.get(key, 0), count) for key in keys}


def _grown_memory(
    few: StageMemory,
    more: StageMemory,
    count: int,
    zero_stage: int,
    bucket_bytes: int,
    *,
    on_gpu: bool,
) -> StageMemory:
    bucketed = np.array([name in BUCKETED[zero_stage] for name in CATEGORIES])
    lasts = ~bucketed & (np.array(CATEGORIES) != "transient")

    def columns(phase: str) -> list[Bytes]:
        found = []
        for pair in zip(*(_parts(getattr(memory, phase)) for memory in (few, more)), strict=True):
            if count > 0:
                found.append(np.maximum(0, grown_peak(pair, [count], bucketed, bucket_bytes)))
            else:
                lasting = np.where(lasts, pair[1].level - pair[0].level, 0)
                found.append(np.maximum(0, pair[0].peak + count * lasting))
        return found

    def grown(name: str) -> Bytes:
        one, other = np.asarray(getattr(few, name)), np.asarray(getattr(more, name))
        return np.maximum(0, one + count * (other - one))

    changes: Changes = {name: grown(name) for name in ARRAYS} | {
        name: int(grown(name)) for name in BYTES
    }
    forward, backward = columns("forward")[-1], columns("backward")
    found = replace(
        few,
        forward=PhaseMemory(np.ones(1), forward[:, None]),
        backward=PhaseMemory(np.array([0.0, 1.0]), np.stack(backward, axis=1)),
        **changes,
    )
    # Gaps of the allocator depend on the order of allocations, and hardly on the blocks.
    gaps = max((each.reserved - 1.0) * _peak(each) for each in (few, more))
    return replace(found, reserved=1.0 + gaps / max(1, _peak(found)) + GROWN_GAPS * on_gpu)


def _parts(phase: PhaseMemory) -> list[PartMemory]:
    """The first and the second part of a phase, each with its peak and the end that grows."""
    total = phase.table.sum(axis=0)
    found = []
    for within, end in ((phase.at <= REACH, 0), (phase.at >= 1.0 - REACH, -1)):
        peak = np.where(within, total, -1).argmax()
        found.append(PartMemory(phase.table[:, peak].copy(), phase.table[:, end].copy()))
    return found


def _peak(memory: StageMemory) -> int:
    """Most bytes of one micro-batch alone."""
    phases = (half.table.sum(axis=0).max(initial=0) for half in (memory.forward, memory.backward))
    return int(memory.always.sum() + max(*phases, memory.update.sum()))


def _mixed_memory(parts: Sequence[tuple[float, StageMemory]]) -> StageMemory:
    first = parts[0][1]

    def phase(name: str) -> PhaseMemory:
        table = sum(share * getattr(each, name).table for share, each in parts)
        return PhaseMemory(getattr(first, name).at, np.asarray(table).astype(np.int64))

    def sum_of(name: str) -> Bytes:
        return np.asarray(sum(s * getattr(each, name) for s, each in parts)).astype(np.int64)

    changes: Changes = {name: sum_of(name) for name in ARRAYS}
    changes |= {name: int(sum_of(name)) for name in BYTES}
    return replace(
        first,
        forward=phase("forward"),
        backward=phase("backward"),
        largest=max(each.largest for _, each in parts),
        reserved=sum(share * each.reserved for share, each in parts),
        **changes,
    )
