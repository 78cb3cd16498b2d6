"""`levels_of`: minimum message sizes for which hierarchical collectives are faster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from math import prod

from autopar.core.ir.mesh_levels import DATA_AXIS, INTER_NODE, INTRA_NODE, Levels, level
from autopar.core.plan.compression import Compression
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import MESH, Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.group_shape import GroupShape
from autopar.passes.communication.hierarchical_collectives import PARTS
from autopar.passes.communication.lower_collectives import emitted
from autopar.passes.compression.reduce_algorithms import messages_of_sum
from autopar.planner.machine import Machine

ALWAYS_FROM = 256 * 2**10
"""Minimum bytes of hierarchical messages on request; latency dominates below."""

SIZES = tuple(2**power for power in range(12, 28))
"""Compared message sizes: 4 KiB to 128 MiB."""


def levels_of(
    base: Plan, strategy: Strategy, machine: Machine | None, backend: str
) -> tuple[Levels, ...]:
    """Levels of each axis over nodes with several ranks, and its hierarchical collectives."""
    axes = (DATA_AXIS, *(axis for axis, _ in base.mesh if axis in MESH))
    cluster = machine.cluster if machine else None
    found = (_levels_along(axis, base, strategy, cluster, backend) for axis in axes)
    return tuple(each for each in found if each is not None)


def _levels_along(
    axis: str, base: Plan, strategy: Strategy, cluster: Cluster | None, backend: str
) -> Levels | None:
    """Levels of an axis; None where nothing needs them."""
    within = neighbours(axis, base, strategy, cluster)
    sizes = Levels(axis, within).sizes(dict(base.mesh)[axis])
    if not sizes:
        return None
    of_data = axis == DATA_AXIS
    methods = _level_codecs(strategy) if of_data else {}
    # Along the data's axis only compressions exchange chunks, and these know levels themselves.
    kinds = [kind for kind in PARTS if not (of_data and kind == "all_to_all")]
    if strategy.hierarchical:
        found = dict.fromkeys((*kinds, *methods), ALWAYS_FROM)
    elif strategy.hierarchical is None and cluster is not None:
        axes = dict(base.mesh) | sizes
        found = sizes_that_pay(cluster, axes, axis, backend, kinds, methods)
    else:
        found = {}
    if not found and not (of_data and base.hybrid):
        return None
    return Levels(axis, within, tuple(found.items()))


def neighbours(axis: str, base: Plan, strategy: Strategy, cluster: Cluster | None) -> int:
    """Ranks of an axis that are next to each other on a node."""
    if axis == DATA_AXIS and base.hybrid:
        return strategy.dp_shard or 1
    on_node = cluster.ranks_per_node if cluster is not None else base.world_size
    if strategy.hierarchical and strategy.hierarchical is not True:
        on_node = strategy.hierarchical
    names, sizes = zip(*base.mesh, strict=True)
    return max(1, on_node // prod(sizes[names.index(axis) + 1 :]))


def _level_codecs(strategy: Strategy) -> dict[str, Compression]:
    """Gradient compressions of a strategy that can be hierarchical.

    PowerSGD is excluded, because its messages are uncompressed all-reduces.
    """
    allowed = strategy.lossy if strategy.compress is None else (strategy.compress,)
    methods = [Compression.of(own) for own in allowed if own != "none"]
    return {own.method: own for own in methods if own.method != "powersgd"}


def sizes_that_pay(
    cluster: Cluster,
    axes: dict[str, int],
    axis: str,
    backend: str,
    kinds: Iterable[str],
    methods: Mapping[str, Compression],
) -> dict[str, int]:
    """Minimum size from which hierarchical messages are always faster, by kind and compression.

    The compute of a compression is ignored.
    """
    between, within = level(axis, INTER_NODE), level(axis, INTRA_NODE)

    def seconds(kind: str, along: str, nbytes: int, by: Compression | None = None) -> float:
        """Seconds of a collective; infinite if unknown."""
        if by is not None:
            sent = messages_of_sum(by, nbytes // 4, axes[along])
            return sum(seconds(kind, along, own) for kind, own in sent)
        shape = GroupShape.of_axis(axes, along, cluster.ranks_per_node)
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
    for name, kind, by in (*((kind, kind, None) for kind in kinds), *summed):
        for nbytes in reversed(SIZES):
            if by_level(kind, nbytes, by) >= seconds(kind, axis, nbytes, by):
                break
            found[name] = nbytes
    return found
