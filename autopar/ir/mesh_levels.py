"""Levels of a mesh axis: those of its ranks that are near each other, and those that are apart.

The ranks of an axis may lie over nodes, `intra_node` neighbours on each. Then collectives can go
over two smaller groups: that of "dp.intra_node", a rank's neighbours, and that of "dp.inter_node",
the ranks at the same place of every node. Levels are no axes of the mesh: they do not multiply
its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.common.documents import Count, Ranks

DATA_AXIS = "dp"
"""The mesh axis whose ranks hold different rows of the batch."""

DATA_STORAGE_AXES = ("dp_replicate", "dp_shard")
"""Levels of `DATA_AXIS` on the mesh of parameters that ZeRO shards over the inner one only."""

INTER_NODE, INTRA_NODE = "inter_node", "intra_node"


@dataclass(frozen=True)
class Levels:
    """Ranks of a mesh axis within and between nodes, and the collectives that use both levels.

    Attributes:
        axis: name of the mesh axis.
        within: how many neighbours are near each other.
        from_bytes: kinds of collectives ("all_reduce", "all_gather", "reduce_scatter"), and methods
            of compressing sums, that go by level, and the least size of what is sent for which
            they do.
    """

    axis: str
    intra_node: Ranks
    from_bytes: tuple[tuple[str, Count], ...] = ()

    def sizes(self, ranks: int) -> dict[str, int]:
        """The size of each level, outermost first; none if an axis of so many ranks has but one.

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
        """Whether a collective of a kind, or a method, goes by level at this size."""
        least = dict(self.from_bytes).get(kind)
        return least is not None and nbytes >= least


def level(axis: str, name: str) -> str:
    """The name of a level of an axis among mesh axes: "dp.intra_node"."""
    return f"{axis}.{name}"


def axis_of_level(name: str) -> str:
    """The mesh axis of a level, or the axis itself."""
    return name.partition(".")[0]


def coordinate_on(name: str, place: int, axes: Mapping[str, int]) -> int:
    """The place on an axis or level of the rank that has this place on the axis.

    Args:
        name: of an axis or a level.
        place: on the axis.
        axes: sizes of axes and levels.
    """
    axis, _, part = name.partition(".")
    if not part:
        return place
    return divmod(place, axes[level(axis, INTRA_NODE)])[part == INTRA_NODE]


def mesh_of(name: str, axes: Mapping[str, int]) -> dict[str, int]:
    """The mesh that an axis or level is an axis of, outermost first, without other levels.

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
