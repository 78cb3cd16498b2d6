"""`Partition`: how a graph lies along an axis that it is partitioned over, as a plan keeps it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.common.documents import Count, Positive, Ranks
from autopar.ir.graph import TrainingGraph, elements, operands
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Placement, Replicate, Shard, placement_of
from autopar.ir.roles import Buffer, Input, Parameter
from autopar.plan.buckets import BUCKET_BYTES

NodeStrategies = tuple[tuple[str, OpStrategy], ...]
"""The ways of nodes by their names; those that are whole on every rank are left out."""


@dataclass(frozen=True)
class Partition:
    """What was decided along one axis.

    Attributes:
        axis: its name.
        ranks: its size.
        parameters: how each parameter lies that is not whole, by name, as text.
        graph: mark of the graph that `op_strategies` are of.
        rows: of the first rank's batch, at which they were decided; 0 if it has them all.
        op_strategies: each way, as text, and the names of the nodes that are computed so.
        bucket_bytes: of sums of gradients that travel together.
    """

    axis: str
    ranks: Ranks
    parameters: tuple[tuple[str, str], ...] = ()
    graph: str = ""
    rows: Count = 0
    strategies: tuple[tuple[str, tuple[str, ...]], ...] = ()
    bucket_bytes: Positive = BUCKET_BYTES

    @staticmethod
    def of(axis: str, ranks: int, graph: TrainingGraph, op_strategies: NodeStrategies) -> Partition:
        """The partition that ways of the first rank's graph make."""
        roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
        names = {n.name: r.name for n, r in roles.items() if isinstance(r, Parameter)}
        table: dict[str, list[str]] = {}
        for name, op_strategy in op_strategies:
            table.setdefault(str(op_strategy), []).append(name)
        return Partition(
            axis,
            ranks,
            tuple(
                (names[name], str(op_strategy.results[0]))
                for name, op_strategy in op_strategies
                if name in names
            ),
            mark(graph),
            rows_of(graph),
            tuple((text, tuple(nodes)) for text, nodes in table.items()),
        )

    def strategies_for(self, graph: TrainingGraph, rows: int) -> NodeStrategies | None:
        """The ways of a graph, None if they were decided for another.

        Args:
            graph: as captured.
            rows: of the first rank's batch; 0 if it has them all.
        """
        if (mark(graph), rows) != (self.graph, self.rows):
            return None
        return tuple(
            (name, parse_op_strategy(text)) for text, names in self.strategies for name in names
        )

    @property
    def layouts(self) -> dict[str, Placement]:
        """How each parameter lies that is not whole."""
        return {name: placement_of(text) for name, text in self.parameters}


def named(op_strategies: Mapping[fx.Node, OpStrategy]) -> NodeStrategies:
    """NodeStrategies by the names of nodes, without those that are whole on every rank."""
    return tuple(
        (node.name, op_strategy)
        for node, op_strategy in op_strategies.items()
        if not is_whole(op_strategy)
    )


def parse_op_strategy(text: str) -> OpStrategy:
    """The way that prints as `text`."""
    text, _, own = text.partition(" by ")
    operands, _, results = text.partition("->")
    return OpStrategy(_placements(operands), _placements(results), own)


def _placements(text: str) -> tuple[Placement, ...]:
    return tuple(map(placement_of, re.findall(r"[A-Z](?:\([^)]*\))?", text)))


def is_whole(op_strategy: OpStrategy) -> bool:
    """Whether every tensor of a way is whole on every rank."""
    return not op_strategy.lowering and all(
        p == Replicate() for p in (*op_strategy.operands, *op_strategy.results)
    )


def mark(graph: TrainingGraph) -> str:
    """A hash of what a graph computes, equal on ranks whose numbers of rows differ.

    Names of operators are made of what they compute.
    """
    lines = [node.name for node in graph.graph.nodes if node.op != "output"]
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        if isinstance(role, (Input, Parameter, Buffer)):
            lines.append(f"{role} {list(_shapes(node))}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _shapes(node: fx.Node) -> Iterable[tuple[object, ...]]:
    """The shapes that a node yields, dims over rows as a word."""
    for tensor, over in zip(elements(node), _rows(node), strict=True):
        yield tuple("rows" if d in over else size for d, size in enumerate(tensor.shape))


def _rows(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """For each tensor that a node yields, the dims that run over the rows of the batch."""
    return node.meta.get("batch_dims") or ((),) * len(elements(node))


def rows_of(graph: TrainingGraph) -> int:
    """The rows that a graph was captured at; 0 if its rank has them all."""
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        for dim in _rows(node)[0] if isinstance(role, Input) else ():
            return int(node.meta["val"].shape[dim])
    return 0


def splits_rows(op_strategies: NodeStrategies, graph: TrainingGraph, rows: int, ranks: int) -> bool:
    """Whether some shard cannot be had at any number of rows.

    It can if it is cut inside of each row, or if what each row has of its dim could be.

    Args:
        op_strategies: decided at a batch of `rows`.
        graph: that they are of, at a number of rows of its own.
        rows: of the first rank's batch.
        ranks: of the axis.
    """
    nodes, own = {node.name: node for node in graph.graph.nodes}, rows_of(graph)

    def fits(placement: Shard, size: int) -> bool:
        inside = placement.interleave % rows == 0
        return inside or (placement.interleave == 1 and size // own % ranks == 0)

    return any(
        isinstance(p, Shard) and p.dim in over and not fits(p, value.shape[p.dim])
        for name, op_strategy in op_strategies
        for node in [nodes[name]]
        for p, over, value in zip(op_strategy.results, _rows(node), elements(node), strict=True)
    )


def scaled(
    op_strategies: NodeStrategies, graph: TrainingGraph, planned: int, rows: int
) -> NodeStrategies:
    """NodeStrategies that were decided at a rank of `planned` rows, at one of `rows`.

    A shard that is cut inside of each row has as many interleaved pieces as there are rows.
    """
    if planned == rows:
        return op_strategies
    nodes = {node.name: node for node in graph.graph.nodes}

    def at(placement: Placement, over: tuple[int, ...]) -> Placement:
        match placement:
            case Shard(dim, pieces) if dim in over and pieces % planned == 0:
                return Shard(dim, pieces // planned * rows)
        return placement

    def mapped(node: fx.Node, op_strategy: OpStrategy) -> OpStrategy:
        reads = (_rows(n)[0] for n in operands(node))
        return replace(
            op_strategy,
            operands=tuple(map(at, op_strategy.operands, reads)),
            results=tuple(map(at, op_strategy.results, _rows(node))),
        )

    return tuple((name, mapped(nodes[name], op_strategy)) for name, op_strategy in op_strategies)
