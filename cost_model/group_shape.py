"""`GroupShape`: the ranks, nodes and number of groups of a collective."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.core.ir.mesh_levels import mesh_of
from autopar.cost_model.cost import ClusterError


@dataclass(frozen=True, order=True)
class GroupShape:
    """A group of ranks, its distribution over nodes, and the number of such groups at once.

    Attributes:
        ranks: ranks in the group.
        ranks_per_node: ranks of the group on each of its nodes.
        groups: groups of this shape that run at once in the whole cluster. They share the NICs and
            cores of the nodes.
    """

    ranks: int
    ranks_per_node: int
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.ranks, self.ranks_per_node, self.groups) < 1:
            raise ClusterError(f"a group shape has positive numbers, not {self}")
        if self.ranks % self.ranks_per_node:
            raise ClusterError(f"{self}: the ranks do not fill its nodes evenly")

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @classmethod
    def of_axis(cls, mesh: Mapping[str, int], axis: str, ranks_per_node: int) -> GroupShape:
        """The groups along one axis of a mesh, all of which run at once.

        Args:
            mesh: size of each axis or level of an axis, outermost first; ranks are in row-major
                order.
            axis: an axis or a level.
            ranks_per_node: ranks on each node of the cluster. If a group has unequal parts on its
                nodes, their greatest common divisor counts.
        """
        mesh = mesh_of(axis, mesh)
        names, sizes = list(mesh), list(mesh.values())
        ranks = mesh[axis]
        stride = math.prod(sizes[names.index(axis) + 1 :])
        # Parts on nodes recur, so one period and what is left over have all of them.
        period = ranks_per_node // math.gcd(stride, ranks_per_node)
        sample = range(min(ranks, period + ranks % period))
        on_node = Counter(rank * stride // ranks_per_node for rank in sample)
        return cls(ranks, math.gcd(*on_node.values()), math.prod(sizes) // ranks)

    def __str__(self) -> str:
        text = f"{self.ranks} ranks, {self.ranks_per_node} a node"
        return text if self.groups == 1 else f"{text}, {self.groups} at once"
