"""`StrategyChooser`: the cheapest strategy of an operator along the batch axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.core.ir.batch_slicing import BatchSlices
from autopar.core.ir.graph import Value, elements, operands
from autopar.core.ir.placement import OpStrategy, Partial, Placement, Replicate, Shard
from autopar.core.ir.signature import describe_argument, moved_bytes
from autopar.passes.core.node_builder import is_view
from autopar.passes.data_parallel.redistribute import (
    BYTES_PER_SENT_BYTE,
    LATENCY,
    Move,
    move_cost,
    moves,
)
from autopar.passes.rules.batch_loops import batch_loops, batch_strategies, draws_random
from autopar.passes.rules.loops import DimAccess, Loop, Operator, Reduced, replicated, split_loop
from autopar.passes.rules.operators.partial_linear import linear_strategies
from autopar.passes.rules.registry import is_supported

WHOLE, PARTIAL = Replicate(), Partial()

ITERATIONS_PER_BYTE = 8.0
"""Iterations of an operator's loops that cost as much as moving one byte of memory."""

PENDING_SUM = 0.9 * LATENCY
"""Cost of the later sum of a partial value, which may share a message with other sums."""


@dataclass(frozen=True)
class OperatorReads:
    """An operator with the value and placement of each operand.

    Attributes:
        available: for each operand, placements that it was redistributed to already.
        stays_partial: whether only gradients of parameters depend on its results.
    """

    node: fx.Node
    values: tuple[Value, ...]
    placements: tuple[Placement, ...]
    available: tuple[frozenset[Placement], ...]
    stays_partial: bool

    @property
    def are_whole(self) -> bool:
        return all(placement == WHOLE for placement in self.placements)


class StrategyChooser:
    """Chooses strategies by their cost; equal operators with equal operands share a choice."""

    def __init__(self, slices: BatchSlices) -> None:
        self.slices = slices
        self._loops: dict[object, list[Loop]] = {}
        self._chosen: dict[object, OpStrategy] = {}

    def choose(self, reads: OperatorReads) -> OpStrategy:
        repeats = tuple(reads.values.index(value) for value in reads.values)
        key = (
            _signature(reads.node),
            reads.placements,
            reads.available,
            repeats,
            reads.stays_partial,
        )
        if key not in self._chosen:
            self._chosen[key] = min(self.strategies(reads), key=lambda s: self.cost(reads, s))
        return self._chosen[key]

    def strategies(self, reads: OperatorReads) -> Iterator[OpStrategy]:
        """Every strategy whose operand placements can be reached by moves.

        An operator without a rule is probed only if an operand is not replicated.
        """
        operator = Operator.of(reads.node)
        found = [replicated(operator)]
        if not reads.are_whole or is_supported(operator.target):
            for loop in self.loops_of(reads.node):
                found += [split_loop(piece) for piece in self._pieces(loop, reads.placements)]
        if not draws_random(operator):
            backward = reads.node.meta["phase"] == "backward"
            found += [
                strategy
                for strategy in (*linear_strategies(operator), *batch_strategies(operator))
                if backward or PARTIAL not in strategy.operands
            ]
        for strategy in dict.fromkeys(found):
            pairs = zip(reads.placements, strategy.operands, strict=True)
            if all(moves(before, after, self.slices) is not None for before, after in pairs):
                yield strategy

    def loops_of(self, node: fx.Node) -> list[Loop]:
        key = _signature(node)
        if key not in self._loops:
            self._loops[key] = batch_loops(Operator.of(node))
        return self._loops[key]

    def _pieces(self, loop: Loop, placements: Sequence[Placement]) -> Iterator[Loop]:
        """A loop in one piece, and in the interleaved pieces of each sharded operand."""
        pieces = {1}
        for access, placement in zip(loop.operands, placements, strict=True):
            if (
                isinstance(access, DimAccess)
                and isinstance(placement, Shard)
                and placement.dim == access.dim
            ):
                inside, rest = divmod(placement.interleave, access.interleave)
                if not rest and loop.interleavable:
                    pieces.add(inside)
        for count in sorted(pieces):
            if loop.size and self.slices.divides(loop.size, count):
                yield loop.interleaved(count)

    def cost(self, reads: OperatorReads, strategy: OpStrategy) -> float:
        """The cost of a strategy and its consequences, in bytes of memory traffic."""
        node, slices = reads.node, self.slices
        placements = (*strategy.operands, *strategy.results)
        is_sharded = any(isinstance(placement, Shard) for placement in placements)
        total = 0.0
        columns = zip(reads.placements, reads.available, strategy.operands, strict=True)
        wanted = dict(zip(reads.values, columns, strict=True))  # once for an operand read twice
        for value, (before, available, after) in wanted.items():
            path = moves(before, after, slices)
            if path is None:
                raise ValueError(f"{value.node} cannot be moved from {before} to {after}")
            for move in path:
                if move.after not in available:
                    total += move_cost(move, value.tensor, slices)
        total += self._work(node) / (slices.count if is_sharded else 1)
        if draws_random(Operator.of(node)) and not is_sharded:
            total += LATENCY  # slice 0 sends its numbers to all
        for placement, tensor in zip(strategy.results, elements(node), strict=True):
            if tensor is None:
                continue
            nbytes = tensor.numel() * tensor.element_size()
            if isinstance(placement, Partial) and not reads.stays_partial:
                total += PENDING_SUM + 2 * BYTES_PER_SENT_BYTE * nbytes
            elif reads.are_whole and isinstance(placement, Shard):  # readers may need it replicated
                total += move_cost(Move("gather", placement, WHOLE), tensor, slices)
            elif placement == WHOLE and reads.stays_partial:
                # Before its sum, a whole gradient is multiplied by this slice's share of the rows.
                total += 2 * nbytes
        return total

    def _work(self, node: fx.Node) -> float:
        """Bytes that an operator moves, or its iterations in bytes if these take longer."""
        if is_view(node):
            return 0.0
        loops = self._loops.get(_signature(node), [])
        iterations = math.prod(loop.size for loop in loops if not loop.lowering)
        return max(float(moved_bytes(node)), iterations / ITERATIONS_PER_BYTE)

    def strategy_for_result(self, node: fx.Node, shard: Placement) -> OpStrategy | None:
        """A strategy that computes a single result as a shard; None if there is none."""
        if not isinstance(shard, Shard) or not is_supported(node.target):
            return None
        for loop in self.loops_of(node):
            (access,) = loop.results
            if loop.lowering or not isinstance(access, DimAccess) or access.dim != shard.dim:
                continue
            pieces, rest = divmod(shard.interleave, access.interleave)
            fits = not rest and (loop.interleavable or pieces == 1)
            if fits and loop.size and self.slices.divides(loop.size, pieces):
                return split_loop(loop.interleaved(pieces))
        return None


def batch_dims_after(node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """The batch dims of each result of an operator on one slice, by its rule."""
    none: tuple[tuple[int, ...], ...] = ((),) * len(elements(node))
    sources = operands(node)
    read = [tuple((n.meta.get("batch_dims") or ((),))[0]) for n in sources]
    known = all(isinstance(n.meta["val"], torch.Tensor) for n in sources)
    if not (known and any(read) and is_supported(node.target)):
        return none
    for loop in batch_loops(Operator.of(node)):
        if [_dims(access) for access in loop.operands] == read:
            return tuple(map(_dims, loop.results))
    return none


def _dims(access: DimAccess | Reduced | None) -> tuple[int, ...]:
    return (access.dim,) if isinstance(access, DimAccess) else ()


def _signature(node: fx.Node) -> tuple[object, ...]:
    return node.target, describe_argument(node.args), describe_argument(node.kwargs)
