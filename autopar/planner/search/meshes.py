"""`meshes`: the meshes and numbers of micro-batches that a strategy leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from autopar.plan.plan import Plan
from autopar.plan.strategy import Strategy

SMALL_WORLD = 8
"""Largest world in which model-parallel axes may cross nodes, where links are slow."""

MICRO_BATCHES_PER_STAGE = 8
"""Most micro-batches tried, for each stage."""

NAMED_MESHES = 8
"""Meshes that a note names; it counts the rest."""


def meshes(
    strategy: Strategy, world_size: int, ranks_per_node: int, blocks: int
) -> Iterator[Strategy]:
    """Every mesh that `strategy.search` leaves open, the fewest model-parallel ranks first."""
    widest = world_size if world_size <= SMALL_WORLD else ranks_per_node
    most = {"pp": blocks, **dict.fromkeys(("tp", "cp", "ep"), widest)}
    found = [replace(strategy, search=())]
    for axis in (a for a in strategy.search if a in most and getattr(strategy, a) is None):
        sizes = [n for n in range(1, most[axis] + 1) if world_size % n == 0]
        found = [replace(one, **{axis: n}) for one in found for n in sizes]  # type: ignore[arg-type]
    fitting = [one for one in found if world_size % model_ranks(one) == 0]
    for one in sorted(fitting, key=lambda one: (model_ranks(one), one.pp_size)):
        yield one
        neighbours = ranks_per_node // one.model_parallel_size
        ranks = world_size // model_ranks(one)
        shards = "dp_shard" in strategy.search and one.dp_shard is None and one.zero != 0
        if shards and 1 < neighbours < ranks and ranks % neighbours == 0:
            yield replace(one, dp_shard=neighbours)


def with_micro_batches(strategy: Strategy, most: int | None = None) -> Iterator[Strategy]:
    """The strategy with each number of micro-batches that it leaves open, the fewest first."""
    if strategy.micro_batches is not None:
        yield strategy
        return
    count, most = 1, most or MICRO_BATCHES_PER_STAGE * max(1, strategy.pp_size)
    while count <= most:
        yield replace(strategy, micro_batches=count)
        count *= 2


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
