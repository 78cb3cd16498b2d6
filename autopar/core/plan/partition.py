"""`Partition`: operator strategies and parameter placements along one model-parallel axis."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload
from autopar.core.common.documents import Count, Positive, Ranks
from autopar.core.ir.graph import TrainingGraph, elements, operands
from autopar.core.ir.placement import OpStrategy, Placement, Replicate, Routed, Shard
from autopar.core.ir.roles import Buffer, Input, Parameter
from autopar.core.plan.buckets import BUCKET_BYTES

NodeStrategies = tuple[tuple[str, OpStrategy], ...]
"""Strategies by node name, without replicated nodes."""


REPLICATED_OVER = ("cp", "ep")
"""Axes whose ranks hold the same parameters, but for experts; over tp few are replicated."""


@dataclass(frozen=True)
class Partition:
    """Strategies along one axis.

    Attributes:
        axis: name of the axis.
        ranks: size of the axis.
        parameters: name and placement of each parameter that operators read sharded.
        graph: `graph_hash` of the graph of `strategies`.
        rows: rows of the first rank's batch in that graph; 0 if the rank has all rows.
        strategies: each strategy, and the names of its nodes.
        bucket_bytes: bucket size of gradient sums along the axis, in bytes.
        zero: name and shard of each other parameter that ZeRO shards over the axis, and that is
            gathered before its uses.
        once: number of neighbouring ranks to which a token is sent once, where rows go to their
            experts: 1, or those of a node. 0: it is sent to each of its experts.
    """

    axis: str
    ranks: Ranks
    parameters: tuple[tuple[str, Placement], ...] = ()
    graph: str = ""
    rows: Count = 0
    strategies: tuple[tuple[OpStrategy, tuple[str, ...]], ...] = ()
    bucket_bytes: Positive = BUCKET_BYTES
    zero: tuple[tuple[str, Placement], ...] = ()
    once: Count = 0

    @staticmethod
    def of(axis: str, ranks: int, graph: TrainingGraph, op_strategies: NodeStrategies) -> Partition:
        """Partition with the given strategies of the first rank's graph."""
        roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
        names = {n.name: r.name for n, r in roles.items() if isinstance(r, Parameter)}
        table: dict[OpStrategy, list[str]] = {}
        for name, op_strategy in op_strategies:
            table.setdefault(op_strategy, []).append(name)
        return Partition(
            axis,
            ranks,
            tuple(
                (names[name], op_strategy.results[0])
                for name, op_strategy in op_strategies
                if name in names
            ),
            graph=graph_hash(graph),
            rows=rows_of(graph),
            strategies=tuple((own, tuple(nodes)) for own, nodes in table.items()),
        )

    def lowers(self, name: str) -> bool:
        """Whether the custom lowering `name` writes some operator."""
        return any(op_strategy.lowering == name for op_strategy, _ in self.strategies)

    @property
    def routes(self) -> bool:
        """Whether rows go to the ranks of their experts."""
        return any(isinstance(p, Routed) for own, _ in self.strategies for p in own.operands)

    def strategies_for(self, graph: TrainingGraph, rows: int) -> NodeStrategies | None:
        """Strategies of the first rank's graph for `rows`; None if they are of another graph."""
        if (graph_hash(graph), rows) != (self.graph, self.rows):
            return None
        return self.node_strategies

    @property
    def node_strategies(self) -> NodeStrategies:
        """Strategies by the names of the nodes in the graph that was planned."""
        return tuple((name, own) for own, names in self.strategies for name in names)

    # Tables are made once: one for each parameter would grow with the square of the depth.
    @cached_property
    def layouts(self) -> dict[str, Placement]:
        """Placement of each parameter that operators read sharded."""
        return dict(self.parameters)

    @cached_property
    def stored(self) -> dict[str, Placement]:
        """Placement between steps of each sharded parameter."""
        return dict((*self.parameters, *self.zero))

    @property
    def zero_dims(self) -> tuple[tuple[str, int], ...]:
        """Name and dim of each parameter that ZeRO shards over the axis."""
        return tuple((name, own.dim) for name, own in self.zero if isinstance(own, Shard))


def by_node_name(op_strategies: Mapping[fx.Node, OpStrategy]) -> NodeStrategies:
    """Strategies by node name, without replicated nodes."""
    return tuple(
        (node.name, own)
        for node, own in op_strategies.items()
        if own.lowering or any(p != Replicate() for p in (*own.operands, *own.results))
    )


def graph_hash(graph: TrainingGraph) -> str:
    """Hash of a graph's operators, their arguments and its inputs.

    Arguments include constants, which decide how an operator may be divided. Devices are left out:
    a plan may be made without them. Arguments may depend on the rows and on the rank. Only the
    first rank's graph can be compared.
    """
    lines = [
        f"{_operator(node)} {_argument(node.args)} {_argument(node.kwargs)}"
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
    return _digest([operators_hash(graph), *lines])


def operators_hash(graph: TrainingGraph) -> str:
    """Hash of a graph's operators and inputs, independent of a rank and its number of rows.

    Node names stand for operators, since fx derives them from their targets.
    """
    lines = [node.name for node in graph.graph.nodes if node.op != "output"]
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        if isinstance(role, (Input, Parameter, Buffer)):
            shapes = [
                tuple("rows" if dim in over else size for dim, size in enumerate(tensor.shape))
                for tensor, over in zip(elements(node), _rows(node), strict=True)
            ]
            lines.append(f"{role} {shapes}")
    return _digest(lines)


def _operator(node: fx.Node) -> str:
    """Name of an operator or function, equal in all processes."""
    target: Any = node.target
    return str(target) if isinstance(target, OpOverload) else target.__name__


def _argument(value: Any) -> str:
    """Text of an argument that is equal in all processes; its class for other objects."""
    match value:
        case fx.Node():
            return value.name
        case tuple() | list():
            return f"({', '.join(map(_argument, value))})"
        case Mapping():
            return f"{{{', '.join(f'{k}={_argument(v)}' for k, v in value.items())}}}"
        case bool() | int() | float() | complex() | str() | slice() | None:
            return repr(value)
        case torch.dtype() | torch.layout() | torch.memory_format():
            return str(value)
    return type(value).__qualname__


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _rows(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """Batch dims of each result of a node."""
    return node.meta.get("batch_dims") or ((),) * len(elements(node))


def rows_of(graph: TrainingGraph) -> int:
    """Rows of the batch in a captured graph; 0 if the rank has all rows."""
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        for dim in _rows(node)[0] if isinstance(role, Input) else ():
            return int(node.meta["val"].shape[dim])
    return 0


def needs_planned_rows(
    op_strategies: NodeStrategies, graph: TrainingGraph, rows: int, ranks: int
) -> bool:
    """Whether some shard is valid only for the planned number of rows.

    Shards within each row are valid for any number of rows, and so are dims that the ranks divide
    even for a single row. The graph may have another number of rows.
    """
    nodes, own = {node.name: node for node in graph.graph.nodes}, rows_of(graph)
    return any(
        isinstance(p, Shard)
        and p.dim in over
        and p.interleave % rows
        and (p.interleave > 1 or value.shape[p.dim] // own % ranks)
        for name, op_strategy in op_strategies
        for node in [nodes[name]]
        for p, over, value in zip(op_strategy.results, _rows(node), elements(node), strict=True)
    )


def rescale_interleave(
    op_strategies: NodeStrategies, graph: TrainingGraph, planned: int, rows: int
) -> NodeStrategies:
    """Adapts strategies for `planned` rows to a rank of `rows` rows.

    A shard within each row has a multiple of the number of rows as its interleave.
    """
    if planned == rows:
        return op_strategies
    nodes = {node.name: node for node in graph.graph.nodes}

    def at(placement: Placement, over: tuple[int, ...]) -> Placement:
        match placement:
            case Shard(dim, pieces) if dim in over and pieces % planned == 0:
                return replace(placement, interleave=pieces // planned * rows)
        return placement

    def mapped(node: fx.Node, op_strategy: OpStrategy) -> OpStrategy:
        reads = (_rows(n)[0] for n in operands(node))
        return replace(
            op_strategy,
            operands=tuple(map(at, op_strategy.operands, reads)),
            results=tuple(map(at, op_strategy.results, _rows(node))),
        )

    return tuple((name, mapped(nodes[name], op_strategy)) for name, op_strategy in op_strategies)
