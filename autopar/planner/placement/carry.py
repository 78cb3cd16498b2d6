"""`SolvedAxes`: operator strategies of one graph, carried over to graphs of the same blocks.

Graphs of one model with other numbers of rows, or of repeated blocks, have the same operators once
repeated blocks count once. The integer program is solved for the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.core.ir.graph import TrainingGraph, elements
from autopar.core.ir.placement import OpStrategy, Placement, Shard
from autopar.core.plan.partition import NodeStrategies, rows_of
from autopar.passes.rules.loops import Operator
from autopar.planner.placement.repeated_nodes import repeated

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Representative:
    """One of the equal nodes of repeated blocks, without its graph.

    Attributes:
        shapes: of its operands, then of its results.
        op_strategy: strategy of all these nodes; None if they are replicated.
    """

    operator: str
    shapes: Shapes
    op_strategy: OpStrategy | None


@dataclass
class SolvedAxes:
    """Strategies of graphs that are partitioned along the same axes.

    Attributes:
        for_all_rows: whether those of graphs with other numbers of rows are carried over.
    """

    for_all_rows: bool = False
    known: dict[Hashable, list[Representative]] = field(default_factory=dict)

    def get(
        self,
        axis: str,
        axes: Mapping[str, int],
        graph: TrainingGraph,
        pins: Mapping[str, Placement],
        solve: Callable[[], NodeStrategies],
    ) -> NodeStrategies:
        """The known strategies along an axis if they suit the graph, else a new solution."""
        rows = 0 if self.for_all_rows else rows_of(graph)
        key, ranks, same = (
            (axis, tuple(axes.items()), rows),
            axes[axis],
            dict(repeated(graph, pins)),
        )
        if key in self.known and (found := carried(self.known[key], same, ranks)) is not None:
            return found
        solved = solve()
        by_name = dict(solved)
        self.known[key] = [_representative(node, by_name.get(node.name)) for node in _first(same)]
        return solved


def carried(
    known: list[Representative], same: Mapping[fx.Node, fx.Node], ranks: int
) -> NodeStrategies | None:
    """Strategies by name of the nodes of another graph; None if its operators or shards differ."""
    nodes = _first(same)
    if len(nodes) != len(known):
        return None
    chosen: dict[fx.Node, OpStrategy] = {}
    for node, own in zip(nodes, known, strict=True):
        other = _representative(node, own.op_strategy)
        if other.operator != own.operator or not _shards_alike(own, other, ranks):
            return None
        if own.op_strategy is not None:
            chosen[node] = own.op_strategy
    return tuple((node.name, chosen[first]) for node, first in same.items() if first in chosen)


def _first(same: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    return sorted(node for node, first in same.items() if node is first)


def _representative(node: fx.Node, op_strategy: OpStrategy | None) -> Representative:
    name = str(node.target) if node.op == "call_function" else node.op
    read = Operator.of(node).operands if node.op == "call_function" else ()
    shapes = tuple(tuple(getattr(value, "shape", ())) for value in (*read, *elements(node)))
    return Representative(name, shapes, op_strategy)


def _shards_alike(one: Representative, other: Representative, ranks: int) -> bool:
    """Whether a strategy shards evenly in both cases what it shards evenly in one."""
    if len(one.shapes) != len(other.shapes) or one.op_strategy is None:
        return len(one.shapes) == len(other.shapes)
    # Some loops allow even shards only, so a strategy may be illegal once evenness changes.
    placements: tuple[Placement | None, ...]
    placements = (*one.op_strategy.operands, *one.op_strategy.results)
    return all(
        len(ours) == len(theirs)
        and (ours[where.dim] % parts == 0) == (theirs[where.dim] % parts == 0)
        for ours, theirs, where in zip(one.shapes, other.shapes, placements, strict=False)
        if isinstance(where, Shard) and ours  # results may be absent
        for parts in (ranks * where.interleave,)
    )
