"""`levels_of`: minimum message sizes for which hierarchical collectives are faster."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from autopar.ir.mesh_levels import DATA_AXIS, INTER_NODE, INTRA_NODE, Levels, level
from autopar.passes.communication.hierarchical_collectives import PARTS
from autopar.passes.communication.lower_collectives import emitted
from autopar.passes.compression.reduce_algorithms import messages_of_sum
from autopar.plan.compression import Compression
from autopar.plan.plan import Plan
from autopar.plan.strategy import Strategy
from autopar.planner.machine import Machine

ALWAYS_FROM = 256 * 2**10
"""Minimum bytes of hierarchical messages on request; latency dominates below."""

SIZES = tuple(2**power for power in range(12, 28))
"""Compared message sizes: 4 KiB to 128 MiB."""


def levels_of(
    base: Plan, strategy: Strategy, machine: Machine | None, backend: str
) -> tuple[Levels, ...]:
    """Levels of the data axis, and its hierarchical collectives; empty for a single level."""
    cluster = machine.cluster if machine else None
    within = _neighbours(base, strategy, cluster)
    own = Levels(DATA_AXIS, within)
    sizes = own.sizes(base.dp_size)
    if not sizes:
        return ()
    methods = _level_codecs(strategy)
    if strategy.hierarchical:
        found = dict.fromkeys((*PARTS, *methods), ALWAYS_FROM)
    elif strategy.hierarchical is None and cluster is not None:
        found = _sizes_that_pay(cluster, dict(base.mesh) | sizes, backend, methods)
    else:
        found = {}
    if not found and not base.hybrid:
        return ()
    return (Levels(DATA_AXIS, within, tuple(found.items())),)


def _neighbours(base: Plan, strategy: Strategy, cluster: Cluster | None) -> int:
    if base.hybrid:
        return strategy.dp_shard or 1
    if strategy.hierarchical and strategy.hierarchical is not True:
        return strategy.hierarchical
    on_node = cluster.ranks_per_node if cluster is not None else base.world_size
    return max(1, on_node // base.model_parallel_size)


def _level_codecs(strategy: Strategy) -> dict[str, Compression]:
    """Gradient compressions of a strategy that can be hierarchical.

    PowerSGD is excluded, because its messages are uncompressed all-reduces.
    """
    allowed = strategy.lossy if strategy.compress is None else (strategy.compress,)
    methods = [Compression.of(own) for own in allowed if own != "none"]
    return {own.method: own for own in methods if own.method != "powersgd"}


def _sizes_that_pay(
    cluster: Cluster, axes: dict[str, int], backend: str, methods: Mapping[str, Compression]
) -> dict[str, int]:
    """Minimum size from which hierarchical messages are always faster, by kind and compression.

    The compute of a compression is ignored.
    """
    between, within = level(DATA_AXIS, INTER_NODE), level(DATA_AXIS, INTRA_NODE)

    def seconds(kind: str, axis: str, nbytes: int, by: Compression | None = None) -> float:
        """Seconds of a collective; infinite if unknown."""
        if by is not None:
            sent = messages_of_sum(by, nbytes // 4, axes[axis])
            return sum(seconds(kind, axis, own) for kind, own in sent)
        shape = GroupShape.of_axis(axes, axis, cluster.ranks_per_node)
        try:
            return cluster.seconds(emitted(kind, backend), nbytes, shape).seconds
        except ClusterError:
            return math.inf

    def by_level(kind: str, nbytes: int, by: Compression | None) -> float:
        share = nbytes // axes[within]
        return sum(
            seconds(k, within, nbytes) if part == INTRA_NODE else seconds(k, between, share, by)
            for k, part in PARTS[kind]
        )

    found = {}
    summed = ((name, "all_reduce", by) for name, by in methods.items())
    for name, kind, by in (*((kind, kind, None) for kind in PARTS), *summed):
        for nbytes in reversed(SIZES):
            if by_level(kind, nbytes, by) >= seconds(kind, DATA_AXIS, nbytes, by):
                break
            found[name] = nbytes
    return found
