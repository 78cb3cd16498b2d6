"""Ranks of the groups of each shape, along the axes of meshes over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_model.group_shape import GroupShape

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of ranks that run at once."""

EVERY_AXIS_RANKS = 8
"""Largest world whose groups are all measured; of larger ones nodes and the world are."""

MAX_GROUPS = 12
"""Largest number of process groups at a time."""


@dataclass(frozen=True, order=True)
class Axis:
    """An axis of some mesh over the ranks: its size, and the distance of neighbours in ranks."""

    ranks: int
    stride: int

    def shape(self, world_size: int, ranks_per_node: int) -> GroupShape:
        outer = world_size // self.ranks // self.stride
        mesh = {"outer": outer, "axis": self.ranks, "inner": self.stride}
        return GroupShape.of_axis(mesh, "axis", ranks_per_node)

    def groups(self, world_size: int) -> Groups:
        length = self.ranks * self.stride
        starts = [rank for rank in range(world_size) if rank % length < self.stride]
        return tuple(tuple(range(start, start + length, self.stride)) for start in starts)


def axes_of(mesh: Mapping[str, int]) -> list[Axis]:
    """The axes of a mesh, outermost first, without those of size 1."""
    sizes = list(mesh.values())
    axes = [Axis(size, math.prod(sizes[at + 1 :])) for at, size in enumerate(sizes)]
    return [axis for axis in axes if axis.ranks > 1]


def levels_of(axes: Iterable[Axis], ranks_per_node: int) -> list[Axis]:
    """The levels of each axis with several ranks on each of several nodes."""
    found = []
    for axis in axes:
        near, rest = divmod(ranks_per_node, axis.stride)
        if not rest and 1 < near < axis.ranks and axis.ranks % near == 0:
            found.append(Axis(near, axis.stride))
            found.append(Axis(axis.ranks // near, axis.stride * near))
    return found


def every_axis(world_size: int) -> list[Axis]:
    """The axes of all meshes over `world_size` ranks: every size and stride that divide it."""
    sizes = _divisors(world_size)[1:]
    return [Axis(size, stride) for size in sizes for stride in _divisors(world_size // size)]


def measured_axes(world_size: int, ranks_per_node: int) -> list[Axis]:
    """Every axis of a small world; of a larger one those inside a node, across nodes and over all.

    Times along other axes are derived from these.
    """
    if world_size <= EVERY_AXIS_RANKS:
        return every_axis(world_size)
    far = [Axis(world_size // ranks_per_node, ranks_per_node), Axis(world_size, 1)]
    near_and_far = [*every_axis(ranks_per_node), *far]
    return list(dict.fromkeys(axis for axis in near_and_far if axis.ranks > 1))


def affordable(
    found: Mapping[GroupShape, Sequence[Groups]],
) -> dict[GroupShape, tuple[Groups, ...]]:
    """The same layouts with at most `MAX_GROUPS` groups of a shape.

    Where more would run at once, one of them is measured alone.
    """
    kept: dict[GroupShape, list[Groups]] = {}
    for shape, several in found.items():
        if len(several[0]) > MAX_GROUPS:
            shape, several = replace(shape, groups=1), [groups[:1] for groups in several]
        kept.setdefault(shape, []).extend(several[: MAX_GROUPS // len(several[0])])
    return {shape: tuple(dict.fromkeys(several)) for shape, several in sorted(kept.items())}


def layouts(
    axes: Iterable[Axis], world_size: int, ranks_per_node: int, *, alone: bool = False
) -> dict[GroupShape, tuple[Groups, ...]]:
    """The layouts over the ranks of each shape that groups along these axes have.

    On a uniform fabric all layouts of one shape take equally long. `alone` adds one group of each
    shape by itself, and for sends a pair on one node and a pair on two, as far as they exist.
    """
    found: dict[GroupShape, list[Groups]] = {}
    for axis in axes:
        shape = axis.shape(world_size, ranks_per_node)
        found.setdefault(shape, []).append(axis.groups(world_size))
    if alone:
        for shape, several in list(found.items()):
            first = [groups[:1] for groups in several]
            found.setdefault(replace(shape, groups=1), []).extend(first)
        if ranks_per_node > 1:
            found.setdefault(GroupShape(2, 2), [((0, 1),)])
        if world_size > ranks_per_node:
            found.setdefault(GroupShape(2, 1), [((0, ranks_per_node),)])
    return {shape: tuple(dict.fromkeys(several)) for shape, several in sorted(found.items())}


def block_of(nodes: Sequence[str]) -> int:
    """The largest divisor of the world size for which every run of ranks is on one node.

    This is the number of ranks per node, if nodes are filled in order of `nodes`, one a rank.
    """
    world = len(nodes)
    return next(
        size
        for size in reversed(_divisors(world))
        if all(len(set(nodes[at : at + size])) == 1 for at in range(0, world, size))
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
