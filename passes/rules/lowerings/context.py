"""`LoweringContext`: an operator to lower, and the means to write its program for one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.core.ir.graph import elements
from autopar.core.ir.placement import OpStrategy, Placement, Shard, chunk_of
from autopar.passes.core.collective_ops import collective, start_all_gather, start_all_reduce
from autopar.passes.core.node_builder import call, inline
from autopar.passes.rules.loops import Operator

aten = torch.ops.aten


@dataclass(frozen=True)
class LoweringContext:
    """An operator on whole tensors, and its shards in the graph of one rank of an axis.

    New nodes take phase, block, source and stage of `like`.
    """

    graph: fx.Graph
    like: fx.Node
    operator: Operator
    op_strategy: OpStrategy
    shards: tuple[fx.Node, ...]
    ranks: int
    rank: int
    axis: str

    @cached_property
    def arguments(self) -> Operator:
        """The operator with this rank's nodes for its tensors."""
        return self.operator.with_operands(self.shards)

    @property
    def shard(self) -> Shard:
        """The placement of the first tensor that is sharded."""
        placements = (*self.op_strategy.operands, *self.op_strategy.results)
        return next(p for p in placements if isinstance(p, Shard))

    def op(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Writes one operator."""
        known = (*self.operator.operands, *self.operator.results)
        with next(t.fake_mode for t in known if t is not None):
            return call(self.graph, self.like, target, *args, **kwargs)

    def trace(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Writes the operators that a function of tensors runs; returns nodes for its tensors."""
        return inline(self.graph, self.like, function, *arguments, placement=None)

    def all_reduce(self, *nodes: fx.Node, op: str = "sum") -> list[fx.Node]:
        """Sums nodes over the ranks, or takes their maximum, in one message."""
        return collective(self.graph, self.like, start_all_reduce, nodes, self.axis, op)

    def gather_stacked(self, node: fx.Node) -> fx.Node:
        """Gathers the node of every rank along a new first dim."""
        row = self.op(aten.unsqueeze.default, node, 0)
        options = ([self.ranks], self.axis)
        (gathered,) = collective(self.graph, self.like, start_all_gather, [row], *options)
        return gathered

    def chunk(self, size: int) -> tuple[int, int]:
        """Offset and size of this rank's chunk of a dim of `size`."""
        return chunk_of(size, self.ranks, self.rank)

    def local_shard(self, node: fx.Node, placement: Placement) -> fx.Node:
        """This rank's shard of a whole node; the node itself if it is not to be sharded."""
        if not isinstance(placement, Shard):
            return node
        dim, pieces = placement.dim, placement.interleave
        piece = value(node).shape[dim] // pieces
        begin, width = self.chunk(piece)
        starts = [begin + piece * i for i in range(pieces)]
        parts = [self.op(aten.slice.Tensor, node, dim, s, s + width) for s in starts]
        return self.op(aten.cat.default, parts, dim) if pieces > 1 else parts[0]

    def upcast(self, node: fx.Node) -> fx.Node:
        """The node in the precision of sums, at least float32."""
        dtype = value(node).dtype
        return self.cast(node, torch.float32 if dtype.itemsize < 4 else dtype)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The node in another dtype."""
        if value(node).dtype == dtype:
            return node
        return self.op(aten._to_copy.default, node, dtype=dtype)

    def as_results(self, *nodes: fx.Node | None) -> list[fx.Node | None]:
        """The nodes in the dtypes of the operator's first results."""
        pairs = zip(nodes, self.operator.results, strict=False)
        return [None if node is None else self.cast(node, like.dtype) for node, like in pairs]


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that yields one."""
    (fake,) = elements(node)
    return fake
