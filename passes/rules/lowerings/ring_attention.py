"""Ring attention: keys and values of all ranks pass by the queries of each.

Queries, keys and values all stay divided along the sequence. In n - 1 steps each rank passes the
keys and values that it has to the next, and computes a block of attention meanwhile. A rank never
has more than two ranks' keys and values. Blocks are merged by their log-sum-exp. In the backward,
gradients of keys and values go round with them, and end where they belong.

Causal attention deals the rows first: of 2n chunks, rank r gets chunks r and 2n - 1 - r. Ranks with
contiguous rows would skip other numbers of blocks, and all would wait for the last one, which skips
none. Dealt, each block after the first is half a block on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import getitem

import torch
from torch import Tensor, fx

from autopar.core.ir.placement import can_cut, chunk_of
from autopar.core.operators.attention import attention, attention_backward
from autopar.core.operators.attention_blocks import Part, attention_block, attention_block_backward
from autopar.passes.core.collective_ops import start_permute, wait
from autopar.passes.rules.loops import Access, DimAccess, Loop, Operator
from autopar.passes.rules.lowerings.context import LoweringContext, aten, value

RING = "ring_attention"
ROWS = 2  # dim of the sequence

Pending = Callable[[], list[fx.Node]]
"""Awaits a message and returns what arrived."""


def ring_loops(operator: Operator) -> list[Loop]:
    """The loop over rows of queries and keys at once, without mask and dropout.

    The random state, which is empty, is a partial maximum. Nothing else has one there, so forward
    and backward of one attention are both rings, or neither is.
    """
    if operator.argument("dropout_p") or operator.argument("attn_mask") is not None:
        return []
    rows, keys = (operator.argument(name).shape[ROWS] for name in ("query", "key"))
    is_causal = operator.argument("is_causal")
    if is_causal and rows != keys:
        return []
    row, size = DimAccess(ROWS), math.gcd(rows, keys)
    operands: tuple[Access, ...] = (row, row, row)
    results: tuple[Access, ...] = (row, row, "max")
    if operator.target is attention_backward:
        operands, results = (*(row,) * 6, "max"), (row, row, row, None)
    loop = Loop(size, operands, results, interleavable=False, even_only=rows != keys)
    return [replace(loop, unit=2 if is_causal else 1)]


def without_ring(operator: Operator, ranks: int) -> str:
    """Why attention cannot go round some ranks; "" if it can."""
    rows, keys = (operator.argument(name).shape[ROWS] for name in ("query", "key"))
    is_causal = operator.argument("is_causal")
    if operator.argument("attn_mask") is not None:
        return "it has a mask"
    if operator.argument("dropout_p"):
        return "it has dropout"
    if is_causal and rows != keys:
        return f"it is causal, from {rows} rows to {keys} keys"
    if is_causal and -(-rows // ranks) % 2:
        return f"it is causal, and the {-(-rows // ranks)} rows of a rank are not two equal chunks"
    if rows != keys and (rows % ranks or keys % ranks):
        return f"{rows} rows and {keys} keys are not equal parts for each rank"
    if not can_cut(rows, ranks):
        return f"of {rows} rows a rank would have none"
    return ""


@dataclass(frozen=True)
class Ring:
    """Messages and blocks of one rank."""

    ctx: LoweringContext
    is_causal: bool

    @property
    def ranks(self) -> int:
        return self.ctx.ranks

    # Messages.

    def send(self, nodes: Sequence[fx.Node], targets: Sequence[int]) -> Pending:
        """Sends nodes from each rank r to rank `targets[r]`; dtypes travel alike."""
        ctx = self.ctx
        started = ctx.op(start_permute, list(nodes), list(targets), ctx.axis)

        def arrived() -> list[fx.Node]:
            done = ctx.op(wait, started)
            return [ctx.op(getitem, done, index) for index in range(len(nodes))]

        return arrived

    def pass_on(self, nodes: Sequence[fx.Node]) -> Pending:
        """Sends nodes to the next rank."""
        return self.send(nodes, [(rank + 1) % self.ranks for rank in range(self.ranks)])

    def packed(self, keys: fx.Node, values: fx.Node) -> list[fx.Node]:
        """Keys and values as one message, which then takes no copy at the ranks behind."""
        if value(keys).shape != value(values).shape:
            return [keys, values]
        return [self.ctx.op(aten.stack.default, [keys, values])]

    def unpacked(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Keys and values of a message."""
        if len(nodes) == 2:
            return list(nodes)
        return [self.ctx.op(aten.select.int, nodes[0], 0, index) for index in (0, 1)]

    # Uneven rows.

    @property
    def rows(self) -> int:
        """Rows of all ranks."""
        return int(self.ctx.operator.argument("key").shape[ROWS])

    @property
    def is_uneven(self) -> bool:
        """Whether the last rank has fewer rows than the others."""
        return self.rows % self.ranks > 0

    def padded(self, *nodes: fx.Node) -> list[fx.Node]:
        """Nodes with as many rows as those of the first rank; zeros come last.

        Causal rows do not see those behind them, and a gradient of zero gives none.
        """
        if not self.is_uneven:
            return list(nodes)
        most, pad = chunk_of(self.rows, self.ranks, 0)[1], aten.constant_pad_nd.default
        missing = [most - value(node).shape[ROWS] for node in nodes]
        below = [[0, 0] * (value(node).dim() - ROWS - 1) for node in nodes]
        places = zip(nodes, below, missing, strict=True)
        return [self.ctx.op(pad, node, [*inner, 0, count]) for node, inner, count in places]

    def trimmed(self, nodes: Sequence[fx.Node], step: int = 0) -> list[fx.Node]:
        """The rows of padded nodes that rank r - step has."""
        if not self.is_uneven:
            return list(nodes)
        owner = (self.ctx.rank - step) % self.ranks
        return self.slices(nodes, 0, chunk_of(self.rows, self.ranks, owner)[1])

    def parts(self, *nodes: fx.Node) -> list[fx.Node]:
        """Keys and values as they travel; rows of causal attention are padded as they are dealt."""
        return list(nodes) if self.is_causal else self.padded(*nodes)

    def seen(self, nodes: Sequence[fx.Node], step: int) -> list[fx.Node]:
        """Keys and values that arrived after so many steps, as a block reads them."""
        return list(nodes) if self.is_causal else self.trimmed(nodes, step)

    # Rows of causal attention.

    def dealt(self, *nodes: fx.Node) -> list[fx.Node]:
        """This rank's two chunks of rows, the earlier one first, of contiguous rows."""
        half = value(nodes[0]).shape[ROWS] // 2
        first, last = (self.slices(nodes, begin, half) for begin in (0, half))
        owners = [min(chunk, 2 * self.ranks - 1 - chunk) for chunk in range(2 * self.ranks)]
        pending = self.send(first, owners[::2]), self.send(last, owners[1::2])
        even, odd = (arrived() for arrived in pending)
        # Of operands in another order on odd ranks, `recompute` would repeat messages in another.
        shift = half * (self.ctx.rank % 2)
        return [
            self.ctx.op(aten.roll.default, node, [shift], [ROWS])
            for node in self.concatenated(even, odd)
        ]

    def collected(self, *nodes: fx.Node) -> list[fx.Node]:
        """This rank's contiguous rows, of its two chunks."""
        half = value(nodes[0]).shape[ROWS] // 2
        begins = (0, half) if self.ctx.rank % 2 == 0 else (half, 0)
        even, odd = (self.slices(nodes, begin, half) for begin in begins)
        pairs = [(rank, 2 * self.ranks - 1 - rank) for rank in range(self.ranks)]
        evens = [(low if low % 2 == 0 else high) // 2 for low, high in pairs]
        odds = [(low if low % 2 else high) // 2 for low, high in pairs]
        pending = self.send(even, evens), self.send(odd, odds)
        first, last = (arrived() for arrived in pending)
        return self.concatenated(first, last)

    def slices(self, nodes: Sequence[fx.Node], begin: int, count: int) -> list[fx.Node]:
        """Some rows of each node."""
        slice_ = aten.slice.Tensor
        return [self.ctx.op(slice_, node, ROWS, begin, begin + count) for node in nodes]

    def concatenated(self, early: Sequence[fx.Node], late: Sequence[fx.Node]) -> list[fx.Node]:
        """The rows of two chunks of each node."""
        pairs = zip(early, late, strict=True)
        return [self.ctx.op(aten.cat.default, [one, other], ROWS) for one, other in pairs]

    # Blocks.

    def call(self, step: int) -> tuple[bool, Part, float | None]:
        """Whether the block of a step is causal, what it computes, and the scale of scores.

        After s steps the keys are those of rank r - s. Of a rank before, its early chunk is before
        all rows here. Of a rank behind, both chunks are before the late rows here.
        """
        scale = self.ctx.operator.argument("scale")
        if not self.is_causal or step == 0:
            return self.is_causal, "whole", scale
        return False, "early" if step <= self.ctx.rank else "late", scale

    def forward(self, query: fx.Node, keys: fx.Node, values: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The result for the queries and its log-sum-exp, in the precision of sums."""
        sent, total = self.packed(*self.parts(keys, values)), None
        for step in range(self.ranks):
            pending = self.pass_on(sent) if step + 1 < self.ranks else None
            block = self.ctx.op(attention_block, query, keys, values, *self.call(step))
            out, logsumexp = (self.ctx.op(getitem, block, index) for index in (0, 1))
            out = self.ctx.upcast(out)
            if total is None:
                total = out, logsumexp
            else:
                total = self.ctx.trace(_merged, *total, out, logsumexp)
            if pending is not None:
                sent = pending()
                keys, values = self.seen(self.unpacked(sent), step + 1)
        assert total is not None
        return total

    def backward(
        self, grad: fx.Node, query: fx.Node, keys: fx.Node, values: fx.Node, *saved: fx.Node
    ) -> list[fx.Node]:
        """The gradients of queries, keys and values, in the precision of sums."""
        ctx, sent = self.ctx, self.packed(*self.parts(keys, values))
        returned: Pending | None = None  # gradients of keys and values of other ranks
        for step in range(self.ranks):
            pending = self.pass_on(sent) if step + 1 < self.ranks else None
            operands = (grad, query, keys, values, *saved)
            block = ctx.op(attention_block_backward, *operands, *self.call(step))
            parts = [ctx.upcast(ctx.op(getitem, block, index)) for index in range(3)]
            if step == 0:
                of_query, *own = parts
            else:
                of_query = ctx.op(aten.add.Tensor, of_query, parts[0])
                packed = self.packed(*self.parts(*parts[1:]))
                returned = self.pass_on(self.added(packed, returned))
            if pending is not None:
                sent = pending()
                keys, values = self.seen(self.unpacked(sent), step + 1)
        if returned is not None:
            arrived = self.seen(self.unpacked(returned()), 0)
            pairs = zip(own, arrived, strict=True)
            own = [ctx.op(aten.add.Tensor, one, other) for one, other in pairs]
        return [of_query, *own]

    def added(self, nodes: list[fx.Node], pending: Pending | None) -> list[fx.Node]:
        """Nodes with the sums that arrive added."""
        if pending is None:
            return nodes
        pairs = zip(pending(), nodes, strict=True)
        return [self.ctx.op(aten.add.Tensor, one, other) for one, other in pairs]


def _merged(out: Tensor, logsumexp: Tensor, part: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """The result over the keys of two blocks, by the log-sum-exp of each."""
    total = torch.logaddexp(logsumexp, own)
    shares = ((each - total).exp().unsqueeze(-1) for each in (logsumexp, own))
    share, others = shares
    return out * share + part * others, total


def _ring(ctx: LoweringContext) -> list[fx.Node | None]:
    """Attention, or its backward, of this rank's rows."""
    ring = Ring(ctx, ctx.operator.argument("is_causal"))
    empty = [0]
    if ctx.operator.target is attention:
        query, keys, values = (
            ring.dealt(*ring.padded(*ctx.shards)) if ring.is_causal else ctx.shards
        )
        out, logsumexp = ring.forward(query, keys, values)
        out = ctx.cast(out, ctx.operator.results[0].dtype)
        if ring.is_causal:
            (out,), (logsumexp,) = (ring.trimmed(ring.collected(each)) for each in (out, logsumexp))
        return [out, logsumexp, ctx.op(aten.new_empty.default, out, empty, dtype=torch.uint8)]
    grad, query, keys, values, out, logsumexp, _ = ctx.shards
    if ring.is_causal:
        rows = ring.padded(grad, query, keys, values, out)
        grad, query, keys, values, out = ring.dealt(*rows)
        (logsumexp,) = ring.dealt(*ring.padded(logsumexp))
    sums = ring.backward(grad, query, keys, values, out, logsumexp)
    gradients = [ctx.cast(node, value(query).dtype) for node in sums]
    if ring.is_causal:
        gradients = ring.trimmed(ring.collected(*gradients))
    return [*gradients, ctx.op(aten.new_empty.default, query, empty)]


LOWERINGS = {RING: ((attention, attention_backward), ring_loops, _ring)}
