"""`practice`: layouts that practitioners would choose, which a search tries before others.

Sources: Narayanan et al. 2021 (arXiv 2104.04473), section 3.5 ("tensor parallelism up to the size
of a node, then pipelines until the model fits") for Megatron's; torchtitan's docs and Llama 3
(arXiv 2407.21783, section 3.3) for FSDP with tp or cp in a node; Megatron Core's guide on mixtures
of experts, which keeps ep in a node, for experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from autopar.core.plan.strategy import Strategy
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.meshes import MICRO_BATCHES_PER_STAGE, experts_of, with_few_shards
from autopar.planner.search.state_bytes import least_state_bytes

LONG_ROW = 32768
"""Elements of a row from which practitioners divide it over ranks of cp."""

STATES_SHARE = 0.5
"""Most of a rank's memory that parameters, gradients and states take in Megatron's layout."""

MEGATRONS = "Megatron's"
"""Name of tensor parallelism in a node, then as many pipeline stages as memory demands."""

AXES = ("pp", "tp", "cp", "ep")


@dataclass(frozen=True)
class PracticeLayout:
    """A layout with its usual name; `strategy` leaves open what practitioners tune."""

    name: str
    strategy: Strategy


def practice(
    problem: PlanningProblem, ranks_per_node: int, cap: int | None
) -> Iterator[PracticeLayout]:
    """Layouts that a strategy leaves open, the likeliest first.

    Args:
        problem: the problem with open axes.
        ranks_per_node: ranks of a node.
        cap: bytes of a rank; None if unknown.
    """
    near = min(ranks_per_node, problem.world_size)
    for name, zero, sizes in _named(problem, near, cap):
        strategy = _opened(problem.strategy, zero, sizes)
        ranks = prod(sizes.values())
        if strategy is None or problem.world_size % ranks:
            continue
        strategy = with_few_shards(strategy, problem.world_size, problem.strategy.search)
        rows = problem.rows // (problem.world_size // ranks)
        counts = (_micro_batches(rows, sizes["pp"]),) if sizes.get("pp", 1) > 1 else (1, rows)
        if strategy.micro_batches is not None:
            counts = (strategy.micro_batches,)
        for count in dict.fromkeys(max(1, each) for each in counts):
            yield PracticeLayout(name, replace(strategy, micro_batches=count))


def _named(
    problem: PlanningProblem, near: int, cap: int | None
) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Name, ZeRO stage and axes of each layout."""
    experts = experts_of(problem.parameters.values())
    own = next((n for n in range(near, 1, -1) if near % n == 0 and n <= experts), 1)
    if own > 1:
        yield "FSDP with experts in a node", 3, {"ep": own}
        yield from _piped(f"{MEGATRONS} with experts", problem, {"ep": own}, cap)
    if problem.row_length >= LONG_ROW:
        yield "FSDP with cp in a node", 3, {"cp": near}
    usual = [*_piped(MEGATRONS, problem, {"tp": near}, cap)]
    usual.insert(usual[0][2]["pp"] > 1, ("FSDP with tp in a node", 3, {"tp": near}))
    yield from usual


def _piped(
    name: str, problem: PlanningProblem, axes: dict[str, int], cap: int | None
) -> Iterator[tuple[str, int, dict[str, int]]]:
    """Megatron's layout: the fewest stages with which states take their share of the memory.

    Its distributed optimizer is ZeRO stage 1.
    """
    blocks, ranks = len(problem.blocks) - 1, prod(axes.values())
    stages = dict.fromkeys(problem.blocks, 1)
    pp = 1
    while cap is not None and 2 * pp <= blocks and problem.world_size % (2 * pp * ranks) == 0:
        others = problem.world_size // (pp * ranks)
        held = least_state_bytes(
            problem.parameters.values(), stages, others, problem.state_ratio, accumulates=True
        )
        if held <= STATES_SHARE * cap * pp * ranks:
            break
        pp *= 2
    yield name, 1, axes | {"pp": pp}


def _opened(strategy: Strategy, zero: int, sizes: dict[str, int]) -> Strategy | None:
    """The strategy with a layout's axes; None if it fixes others."""
    for axis in AXES:
        fixed, wanted = getattr(strategy, axis), sizes.get(axis, 1)
        if fixed is None and wanted > 1 and axis not in strategy.search:
            return None
        if fixed is not None and fixed != wanted:
            return None
    own: dict[str, Any] = {axis: sizes.get(axis, 1) for axis in AXES}
    return replace(
        strategy, search=(), zero=zero if strategy.zero is None else strategy.zero, **own
    )


def _micro_batches(rows: int, stages: int) -> int:
    """Micro-batches of as few rows as possible, at most some for each stage."""
    most = min(rows, MICRO_BATCHES_PER_STAGE * stages)
    return next((count for count in range(most, 0, -1) if rows % count == 0), 1)
