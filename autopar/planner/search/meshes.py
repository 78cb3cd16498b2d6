"""`meshes`: the meshes and numbers of micro-batches that a strategy leaves open."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from autopar.core.ir.graph import ParameterInfo
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.planner.problem import PlanningProblem

SMALL_WORLD = 8
"""Largest world in which model-parallel axes may cross nodes, where links are slow."""

MOST_SHARDS = 1024
"""Most data-parallel ranks that ZeRO shards over in a search. More would have less than a row each
of most parameters, and gather the padding."""

LEAST_TOKENS = 4096
"""Fewest elements of a row on a rank where cp is searched beyond a node."""

MICRO_BATCHES_PER_STAGE = 8
"""Most micro-batches tried, for each stage."""

MOST_MICRO_BATCHES = 256
"""Most micro-batches that are tried without stages, before anything is estimated."""

NAMED_MESHES = 8
"""Meshes that a note names; it counts the rest."""


@dataclass(frozen=True)
class MostRanks:
    """Most ranks that each axis of a model is worth in a search.

    tp stays on a node of larger worlds. ep and cp may go beyond it, one of them at a time.
    """

    pp: int
    tp: int
    ep: int
    cp: int

    @staticmethod
    def of(problem: PlanningProblem, ranks_per_node: int) -> MostRanks:
        """Most ranks of a model in a world of nodes."""
        world_size = problem.world_size
        near = world_size if world_size <= SMALL_WORLD else ranks_per_node
        experts = experts_of(problem.parameters.values())
        length = problem.row_length // LEAST_TOKENS
        return MostRanks(len(problem.blocks), near, max(near, experts), max(near, length))


def open_meshes(problem: PlanningProblem, ranks_per_node: int) -> Iterator[Strategy]:
    """Every mesh that the strategy of a problem leaves open."""
    most = MostRanks.of(problem, ranks_per_node)
    return meshes(problem.strategy, problem.world_size, ranks_per_node, most)


def meshes(
    strategy: Strategy, world_size: int, ranks_per_node: int, most: MostRanks
) -> Iterator[Strategy]:
    """Every mesh that `strategy.search` leaves open, the fewest model-parallel ranks first."""
    open_axes = [a for a in ("pp", "tp", "cp", "ep") if a in strategy.search]
    open_axes = [axis for axis in open_axes if getattr(strategy, axis) is None]
    found = [replace(strategy, search=())]
    for axis in open_axes:
        sizes = [n for n in range(1, getattr(most, axis) + 1) if world_size % n == 0]
        found = [replace(one, **{axis: n}) for one in found for n in sizes]  # type: ignore[arg-type]

    def is_tried(one: Strategy) -> bool:
        far = [a for a in open_axes if a in ("ep", "cp") and one.axes.get(a, 1) > most.tp]
        return world_size % model_ranks(one) == 0 and len(far) <= 1

    fitting = filter(is_tried, found)
    for one in sorted(fitting, key=lambda one: (model_ranks(one), one.pp_size)):
        yield with_few_shards(one, world_size, strategy.search)
        neighbours = ranks_per_node // one.model_parallel_size
        ranks = world_size // model_ranks(one)
        shards = "dp_shard" in strategy.search and one.dp_shard is None and one.zero != 0
        if shards and 1 < neighbours < ranks and ranks % neighbours == 0:
            yield replace(one, dp_shard=neighbours)


def with_few_shards(strategy: Strategy, world_size: int, search: Iterable[str]) -> Strategy:
    """The strategy with ZeRO over MOST_SHARDS ranks or fewer, in worlds that have more of them."""
    ranks = world_size // model_ranks(strategy)
    is_open = "dp_shard" in search and strategy.dp_shard is None and strategy.zero != 0
    if not is_open or ranks <= MOST_SHARDS:
        return strategy
    most = max(n for n in range(1, MOST_SHARDS + 1) if ranks % n == 0)
    return replace(strategy, dp_shard=most) if most > 1 else strategy


def experts_of(parameters: Iterable[ParameterInfo]) -> int:
    """Most matrices in a stack of them; 1 if there are none.

    The kernels of convolutions have three dims, too, but smaller ones behind the first.
    """
    stacks = (info.shape for info in parameters if len(info.shape) == 3)
    return max((count for count, *sizes in stacks if count < min(sizes)), default=1)


def with_micro_batches(
    strategy: Strategy, most: int | None = None, rows: int = 0
) -> Iterator[Strategy]:
    """The strategy with each number of micro-batches that it leaves open, the fewest first.

    They are powers of two, or the divisors of `rows` next to them if a rank's rows are known.
    """
    if strategy.micro_batches is not None:
        yield strategy
        return
    most = most or MICRO_BATCHES_PER_STAGE * max(1, strategy.pp_size)
    powers = [2**k for k in range(most.bit_length())]
    divisors = [n for n in range(1, min(rows, most) + 1) if rows % n == 0]
    counts = [min(divisors, key=lambda n: abs(math.log2(n / p))) for p in powers if divisors]
    for count in dict.fromkeys(counts or powers):
        yield replace(strategy, micro_batches=count)


def micro_batched(
    problem: PlanningProblem, mesh: Strategy, most: int | None = None
) -> Iterator[Strategy]:
    """A mesh with each number of micro-batches that divides the rows of its ranks, if known."""
    ranks = problem.world_size // model_ranks(mesh)
    rows = 0 if problem.rows % ranks else problem.rows // ranks
    return with_micro_batches(mesh, most, rows)


def model_ranks(strategy: Strategy) -> int:
    """Number of ranks that share one copy of the model."""
    return strategy.model_parallel_size * strategy.pp_size


def mesh_name(strategy: Strategy) -> str:
    """The mesh and number of micro-batches as text."""
    axes = {"pp": strategy.pp_size, **strategy.axes, "dp_shard": strategy.dp_shard or 1}
    mesh = " x ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1) or "data parallel"
    count = strategy.micro_batches or 1
    return f"{mesh} in {count} micro-batches" if count > 1 else mesh


def abbreviated(names: Iterable[str]) -> str:
    """The first names, and the number of further names."""
    names = iter(names)
    first, rest = list(islice(names, NAMED_MESHES)), len(list(names))
    return ", ".join(first) + (f" and {rest} more" if rest else "")


def unusual_axes(strategy: Strategy) -> int:
    """Number of axes of a mesh other than data, tp and pp."""
    return sum((size or 1) > 1 for size in (strategy.cp, strategy.ep, strategy.dp_shard))


def least_compute_s(plan: Plan) -> float:
    """Seconds of a plan's FLOPs at the peak rate of all ranks; 0 if unknown."""
    work = plan.prediction.work if plan.prediction is not None else None
    if work is None or not work.peak:
        return 0.0
    return work.flops / (work.peak * plan.world_size)


def likely_to_fit(strategy: Strategy) -> tuple[bool, int, int]:
    """Order of meshes where data parallelism does not fit: neighbours, tp, wide models first."""
    return model_ranks(strategy) > 1, unusual_axes(strategy), -model_ranks(strategy)
