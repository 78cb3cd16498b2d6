"""Which messages go by level, and from which size on: as the curves of the two levels say."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.shape import GroupShape
from autopar.levels import BETWEEN, WITHIN, Levels, level
from autopar.passes.hierarchical_collectives import PARTS
from autopar.passes.lower_collectives import emitted
from autopar.plan import Plan
from autopar.planner.machine import Machine
from autopar.strategy import Strategy

ALWAYS_FROM = 64 * 2**10
"""Bytes from which messages go by level where the user wants it so: below, latency counts."""

SIZES = tuple(2**power for power in range(12, 28))
"""4 KiB to 128 MiB: what is compared."""


def levels_of(
    base: Plan, strategy: Strategy, machine: Machine | None, backend: str
) -> tuple[Levels, ...]:
    """The levels of the data's axis, and what goes by them; none if its ranks are all alike.

    Args:
        base: a plan with its mesh.
        strategy: what is fixed.
        machine: with the cluster; None if nothing was measured.
        backend: what collectives are lowered for.
    """
    cluster = machine.cluster if machine else None
    within = neighbours(base, strategy, cluster)
    own = Levels(base.axis, within)
    sizes = own.sizes(base.data_ranks)
    if not sizes:
        return ()
    axes = dict(base.mesh) | sizes
    if strategy.hierarchical:
        found = dict.fromkeys(PARTS, ALWAYS_FROM)
    elif strategy.hierarchical is None and cluster is not None:
        prices = _Prices(cluster, axes, base.axis, backend)
        sized = {kind: prices.pays_from(kind) for kind in PARTS}
        found = {kind: least for kind, least in sized.items() if least is not None}
    else:
        found = {}
    if not found and not base.hybrid:
        return ()
    return (Levels(base.axis, within, tuple(found.items())),)


def neighbours(base: Plan, strategy: Strategy, cluster: Cluster | None) -> int:
    """How many ranks of the data's axis, one beside the other, are near each other."""
    if base.hybrid:
        return strategy.dp_shard or 1
    if strategy.hierarchical and strategy.hierarchical is not True:
        return strategy.hierarchical
    on_node = cluster.ranks_per_node if cluster is not None else base.world_size
    return max(1, on_node // base.tensor_ranks)


@dataclass(frozen=True)
class _Prices:
    """Seconds of collectives over an axis and over its levels, as they are lowered."""

    cluster: Cluster
    axes: dict[str, int]
    axis: str
    backend: str

    def pays_from(self, kind: str) -> int | None:
        """The size from which all larger messages are faster by level, if there is one."""
        least = None
        for nbytes in reversed(SIZES):
            if self.by_level(kind, nbytes) >= self.seconds(kind, self.axis, nbytes):
                break
            least = nbytes
        return least

    def by_level(self, kind: str, nbytes: int) -> float:
        share = self.axes[level(self.axis, WITHIN)]
        sizes = {WITHIN: nbytes, BETWEEN: nbytes // share}
        parts = PARTS[kind]
        return sum(self.seconds(k, level(self.axis, part), sizes[part]) for k, part in parts)

    def seconds(self, kind: str, axis: str, nbytes: int) -> float:
        """Infinite where nothing is known of it."""
        shape = GroupShape.of_axis(self.axes, axis, self.cluster.ranks_per_node)
        try:
            return self.cluster.seconds(emitted(kind, self.backend), nbytes, shape).seconds
        except ClusterError:
            return math.inf
