"""`practice`: layouts that practitioners would choose, which a search tries before others.

DDP, FSDP and FSDP with recomputation are among the candidates of data parallelism (`Baseline`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

from autopar.core.common.deadline import TimeIsOver
from autopar.core.plan.plan import Plan
from autopar.core.plan.search_outcome import MEGATRONS, PracticePlan
from autopar.core.plan.strategy import Strategy
from autopar.errors import AutoparError, OutOfMemoryError
from autopar.formatting import first_line, human_bytes
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.meshes import (
    MICRO_BATCHES_PER_STAGE,
    MOST_MICRO_BATCHES,
    experts_of,
    with_few_shards,
)
from autopar.planner.search.search_progress import TooCostlyError
from autopar.planner.search.state_bytes import least_state_bytes

LONG_ROW = 32768
"""Elements of a row from which practitioners divide it over ranks of cp."""

STATES_SHARE = 0.5
"""Most of a rank's memory that parameters, gradients and states take in a usual layout."""

DEEPSEEKS_NODES = 8
"""Most nodes that experts are spread over."""

NO_TIME = "no time was left"

AXES = ("pp", "tp", "cp", "ep")

Sizes = Mapping[str, int]
"""Ranks along each axis of the model, and of `dp_shard`."""


@dataclass(frozen=True)
class PracticeLayout:
    """A layout with its usual name; `strategy` leaves open what practitioners tune."""

    name: str
    strategy: Strategy


@dataclass(frozen=True)
class Facts:
    """Facts that practitioners choose a layout by.

    Attributes:
        node: ranks of a node.
        cap: bytes of a rank; None if unknown.
    """

    problem: PlanningProblem
    node: int
    cap: int | None

    @cached_property
    def near(self) -> int:
        """Most ranks of a node that divide the world."""
        return gcd(self.problem.world_size, self.node)

    @cached_property
    def experts(self) -> int:
        return experts_of(self.problem.parameters.values())

    def spread_experts(self, ranks: int) -> int:
        """Most of some ranks that experts are spread over; 1 without experts."""
        most = min(ranks, self.experts)
        return next((n for n in range(most, 1, -1) if ranks % n == 0), 1)

    def states_fit(self, sharding: int, *, ways: int, zero: int = 1) -> bool:
        """Whether states take their share of the memory.

        Args:
            sharding: ranks that ZeRO shards over.
            ways: ranks that the model is divided over.
            zero: its stage.
        """
        if self.cap is None:
            return True
        stages = dict.fromkeys(self.problem.blocks, zero)
        infos, ratio = self.problem.parameters.values(), self.problem.state_ratio
        held = least_state_bytes(infos, stages, sharding, ratio, accumulates=True)
        return held <= STATES_SHARE * self.cap * ways

    def piped(self, axes: Sizes, zero: int = 1) -> Sizes:
        """Axes with the fewest stages with which states fit."""
        world, ranks, pp = self.problem.world_size, prod(axes.values()), 1
        blocks = len(self.problem.blocks) - 1
        while 2 * pp <= blocks and world % (2 * pp * ranks) == 0:
            if self.states_fit(world // (pp * ranks), ways=pp * ranks, zero=zero):
                break
            pp *= 2
        return {**axes, "pp": pp}


def _near_experts(facts: Facts) -> Sizes | None:
    ranks = facts.spread_experts(facts.near)
    return {"ep": ranks} if ranks > 1 else None


def _piped_experts(facts: Facts) -> Sizes | None:
    axes = _near_experts(facts)
    return facts.piped(axes) if axes else None


def _deepseeks(facts: Facts) -> Sizes | None:
    """Experts over several nodes, then stages."""
    ranks = gcd(facts.problem.world_size, DEEPSEEKS_NODES * facts.near)
    ranks = facts.spread_experts(ranks)
    return facts.piped({"ep": ranks}) if ranks > 1 else None


def _long_rows(facts: Facts) -> Sizes | None:
    return {"cp": facts.near} if facts.problem.row_length >= LONG_ROW else None


def _megatrons(facts: Facts) -> Sizes | None:
    return facts.piped({"tp": facts.near})


def _sharded_and_tp(facts: Facts) -> Sizes | None:
    return {"tp": facts.near} if facts.near > 1 else None


def _three(facts: Facts) -> Sizes | None:
    """Stages where ZeRO 3 and tp alone leave too little room; torchtitan gathers once a step."""
    sizes = facts.piped({"tp": facts.near}, zero=2)
    return sizes if sizes["pp"] > 1 else None


def _replicated(facts: Facts) -> Sizes | None:
    """Shards within a node, which every node has a copy of."""
    nodes = facts.problem.world_size // facts.near
    return {"dp_shard": facts.near} if facts.near > 1 and nodes > 1 else None


def _replicated_and_tp(facts: Facts) -> Sizes | None:
    """Shards over as few nodes as states fit on, which the others have copies of."""
    nodes = facts.problem.world_size // facts.near
    for shards in range(2, nodes):
        if nodes % shards == 0 and facts.states_fit(shards, ways=facts.near, zero=3):
            return {"tp": facts.near, "dp_shard": shards}
    return None


USUAL: tuple[tuple[str, int, Callable[[Facts], Sizes | None]], ...] = (
    # Megatron Core's guide on mixtures of experts keeps ep in a node.
    ("FSDP with experts in a node", 3, _near_experts),
    (f"{MEGATRONS} with experts", 1, _piped_experts),
    # DeepSeek-V3 (arXiv 2412.19437, section 3.2): 16 stages, ep over 8 nodes, ZeRO 1, no tp.
    ("DeepSeek's", 1, _deepseeks),
    # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: tables 2, 4 and 5, with selective or
    # full recomputation. Llama 3 (arXiv 2407.21783, table 4) has the same three axes.
    ("torchtitan's FSDP and cp", 3, _long_rows),
    # Priced before pipelines, which take the longest where a model is deep.
    ("torchtitan's FSDP and tp", 3, _sharded_and_tp),
    # Narayanan et al. 2021 (arXiv 2104.04473), section 3.5: tp up to the size of a node, then
    # stages until the model fits. Its distributed optimizer is ZeRO 1.
    (MEGATRONS, 1, _megatrons),
    ("torchtitan's FSDP, tp and pp", 2, _three),
    # torchtitan, docs/fsdp.md and data_parallel_replicate_degree.
    ("HSDP", 3, _replicated),
    ("torchtitan's HSDP and tp", 3, _replicated_and_tp),
)
"""Name, ZeRO stage and sizes of each layout, None where it does not apply; the likeliest first.

Recomputation, schedules and buckets are open, so that its price is that of the best choice.
"""


def practice(
    problem: PlanningProblem, ranks_per_node: int, cap: int | None
) -> Iterator[PracticeLayout]:
    """Layouts that a strategy leaves open, the likeliest first.

    Args:
        problem: the problem with open axes.
        ranks_per_node: ranks of a node.
        cap: bytes of a rank; None if unknown.
    """
    facts = Facts(problem, ranks_per_node, cap)
    for name, zero, sizes_for in USUAL:
        sizes = sizes_for(facts)
        strategy = _opened(problem.strategy, zero, sizes) if sizes else None
        if sizes is None or strategy is None:
            continue
        strategy = with_few_shards(strategy, problem.world_size, problem.strategy.search)
        ranks = prod(sizes.get(axis, 1) for axis in AXES)
        rows = problem.rows // (problem.world_size // ranks)
        pp = sizes.get("pp", 1)
        most = MICRO_BATCHES_PER_STAGE * pp if pp > 1 else MOST_MICRO_BATCHES
        counts = (1,) * (pp == 1) + (_micro_batches(rows, most),)
        if strategy.micro_batches is not None:
            counts = (strategy.micro_batches,)
        for count in dict.fromkeys(max(1, each) for each in counts):
            several = count > 1 or pp > 1
            own = count if several else strategy.micro_batches
            yield PracticeLayout(name, replace(strategy, micro_batches=own))


def megatrons(
    problem: PlanningProblem, ranks_per_node: int, cap: int | None
) -> Iterator[PracticeLayout]:
    """Megatron's layout beside a strategy that excludes it."""
    free = Strategy(search=("pp", "tp"), batch_semantics=problem.strategy.batch_semantics)
    layouts = practice(replace(problem, strategy=free), ranks_per_node, cap)
    return (each for each in layouts if each.name == MEGATRONS)


def priced(layout: PracticeLayout, plan: Plan | str) -> PracticePlan:
    """The price of a layout by its plan, or the reason why there is none."""
    if isinstance(plan, str):
        return PracticePlan(layout.name, why=plan)
    cost = plan.prediction
    assert cost is not None
    return PracticePlan(layout.name, plan.name, cost.step_s, needed_bytes=cost.needed_bytes)


def why_not(error: AutoparError | TimeIsOver) -> str:
    """The reason why a layout has no plan."""
    if isinstance(error, OutOfMemoryError):
        return f"lacks {human_bytes(error.shortfall)}"
    return NO_TIME if isinstance(error, TimeIsOver | TooCostlyError) else first_line(error)


def _opened(strategy: Strategy, zero: int, sizes: Sizes) -> Strategy | None:
    """The strategy with a layout's axes; None if it fixes others."""
    for axis in (*AXES, "dp_shard"):
        fixed, wanted = getattr(strategy, axis), sizes.get(axis, 1)
        if fixed is None and wanted > 1 and axis not in strategy.search:
            return None
        if fixed is not None and fixed != wanted:
            return None
    if "dp_shard" in sizes and strategy.zero == 0:
        return None  # without shards there is nothing to replicate
    own: dict[str, Any] = {axis: sizes.get(axis, 1) for axis in AXES}
    own["dp_shard"] = sizes.get("dp_shard")
    return replace(
        strategy, search=(), zero=zero if strategy.zero is None else strategy.zero, **own
    )


def _micro_batches(rows: int, most: int) -> int:
    """Micro-batches of as few rows as possible, at most some."""
    divisors = range(min(rows, most), 0, -1)
    return next((count for count in divisors if rows % count == 0), 1)
