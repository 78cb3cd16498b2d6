"""Levels of a mesh axis: its ranks within a node, and across nodes.

An axis may span several nodes, with `intra_node` ranks on each. Hierarchical collectives then use
two smaller process groups per rank:

- "dp.intra_node": the ranks of the axis on the same node;
- "dp.inter_node": the ranks with the same position on every node.

Levels are not mesh axes: they do not multiply the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.core.common.documents import Count, Ranks

DATA_AXIS = "dp"
"""Data-parallel mesh axis, whose ranks hold different rows of the batch."""

DATA_STORAGE_AXES = ("dp_replicate", "dp_shard")
"""Names of the levels of `DATA_AXIS` in torch's mesh for hybrid sharding."""

INTER_NODE, INTRA_NODE = "inter_node", "intra_node"


@dataclass(frozen=True)
class Levels:
    """Levels of a mesh axis, and the collectives that run hierarchically.

    Attributes:
        axis: name of the mesh axis.
        intra_node: number of neighbouring ranks on one node.
        from_bytes: minimum message size in bytes of each hierarchical collective: "all_reduce",
            "all_gather", "reduce_scatter", or a compression method of gradient sums.
    """

    axis: str
    intra_node: Ranks
    from_bytes: tuple[tuple[str, Count], ...] = ()

    def sizes(self, ranks: int) -> dict[str, int]:
        """Size of each level of an axis of `ranks`, outermost first; empty for a single level.

        >>> Levels("dp", 4).sizes(8)
        {'dp.inter_node': 2, 'dp.intra_node': 4}
        >>> Levels("dp", 4).sizes(4), Levels("dp", 4).sizes(6)
        ({}, {})
        """
        if ranks % self.intra_node or not 1 < self.intra_node < ranks:
            return {}
        sizes = {INTER_NODE: ranks // self.intra_node, INTRA_NODE: self.intra_node}
        return {level(self.axis, name): size for name, size in sizes.items()}

    def splits(self, kind: str, nbytes: int) -> bool:
        """Whether a collective or compression method is hierarchical for `nbytes`."""
        least = dict(self.from_bytes).get(kind)
        return least is not None and nbytes >= least


def level(axis: str, name: str) -> str:
    """Name of a level of an axis, such as "dp.intra_node"."""
    return f"{axis}.{name}"


def axis_of_level(name: str) -> str:
    """Mesh axis of a level; an axis is returned unchanged."""
    return name.partition(".")[0]


def coordinate_on(name: str, place: int, axes: Mapping[str, int]) -> int:
    """Coordinate of a rank on an axis or level, from its coordinate `place` on the axis."""
    axis, _, part = name.partition(".")
    if not part:
        return place
    return divmod(place, axes[level(axis, INTRA_NODE)])[part == INTRA_NODE]


def mesh_of(name: str, axes: Mapping[str, int]) -> dict[str, int]:
    """Mesh with `name` as an axis, outermost first: a level replaces its axis by both levels.

    >>> axes = {"dp": 4, "tp": 2, "dp.inter_node": 2, "dp.intra_node": 2}
    >>> mesh_of("dp.intra_node", axes), mesh_of("tp", axes)
    ({'dp.inter_node': 2, 'dp.intra_node': 2, 'tp': 2}, {'dp': 4, 'tp': 2})
    """
    mesh = {axis: size for axis, size in axes.items() if axis == axis_of_level(axis)}
    own = axis_of_level(name)
    if own == name:
        return mesh
    parts = {part: axes[part] for part in (level(own, INTER_NODE), level(own, INTRA_NODE))}
    found: dict[str, int] = {}
    for axis, size in mesh.items():
        found |= parts if axis == own else {axis: size}
    return found
