"""`LoweringContext`: where an own lowering writes, and what it is given there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar.ir.graph import elements
from autopar.ir.op_strategy import OpStrategy
from autopar.ir.placement import Placement, Shard, chunk_of
from autopar.passes.core.collective_ops import collective, start_all_gather, start_all_reduce
from autopar.passes.core.node_builder import call
from autopar.passes.rules.local_args import with_operands
from autopar.passes.rules.loops import Operator

aten = torch.ops.aten


@dataclass(frozen=True)
class LoweringContext:
    """The place of an operator in one rank's graph.

    Attributes:
        graph: written to at its insertion point.
        like: the node that is lowered, for what new nodes take from it.
        operator: the operator, on whole tensors.
        op_strategy: how it is split.
        shards: what this rank has of each operand.
        ranks: of the axis.
        rank: this one.
        axis: its name.
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
        """The operator with this rank's nodes in the place of tensors, by place or name."""
        args, kwargs = with_operands(self.operator, self.shards)
        return Operator(self.operator.target, tuple(args), kwargs, self.operator.results)

    @property
    def shard(self) -> Shard:
        """How the first tensor that is sharded lies."""
        return next(
            p
            for p in (*self.op_strategy.operands, *self.op_strategy.results)
            if isinstance(p, Shard)
        )

    def op(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new operator."""
        known = (*self.operator.operands, *self.operator.results)
        with next(t.fake_mode for t in known if t is not None):
            return call(self.graph, self.like, target, *args, **kwargs)

    def all_reduce(self, *nodes: fx.Node, op: str = "sum") -> list[fx.Node]:
        """These nodes summed over the ranks (or their maximum), in one message."""
        return collective(self.graph, self.like, start_all_reduce, nodes, self.axis, op)

    def gather_stacked(self, node: fx.Node) -> fx.Node:
        """What every rank has of this node, in a new first dim."""
        row = self.op(aten.unsqueeze.default, node, 0)
        (found,) = collective(
            self.graph, self.like, start_all_gather, [row], [self.ranks], self.axis
        )
        return found

    def chunk(self, size: int) -> tuple[int, int]:
        """Where this rank's chunk of a dim of `size` begins, and its size."""
        return chunk_of(size, self.ranks, self.rank)

    def local_shard(self, node: fx.Node, placement: Placement) -> fx.Node:
        """This rank's shard of what is whole; anything else as it is."""
        if not isinstance(placement, Shard):
            return node
        dim, pieces = placement.dim, placement.interleave
        piece = value(node).shape[dim] // pieces
        begin, width = self.chunk(piece)
        starts = [begin + piece * i for i in range(pieces)]
        parts = [self.op(aten.slice.Tensor, node, dim, s, s + width) for s in starts]
        return self.op(aten.cat.default, parts, dim) if pieces > 1 else parts[0]

    def upcast(self, node: fx.Node) -> fx.Node:
        """In the precision that sums are computed in: at least float32."""
        dtype = value(node).dtype
        return self.cast(node, torch.float32 if dtype.itemsize < 4 else dtype)

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """In another dtype."""
        return node if value(node).dtype == dtype else self.op(_TO, node, dtype=dtype)


_TO = aten._to_copy.default


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node that yields one."""
    (fake,) = elements(node)
    return fake
