"""`CompressedReduce`: what all ways of sending a bucket's sum compressed have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.ir.graph import TrainingGraph, tensors
from autopar.ir.mesh_levels import INTER_NODE, INTRA_NODE, level
from autopar.ir.placement import Partial, chunk_rows
from autopar.ir.roles import OutputRole, State, Update
from autopar.passes.core.collective_ops import (
    axis_of,
    collective,
    replace_collective,
    results_of,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from autopar.passes.core.inline import inline
from autopar.passes.core.node_builder import add_input, fake_like
from autopar.plan.compression import Compression


class CompressedReduce:
    """Writes what one started sum becomes.

    By level, neighbours first sum what they have as it is, each a part of it; the parts travel
    compressed, between the ranks that have the same one; and neighbours share what came of them.
    What was not sent of a part is left with the rank that has the part.

    Attributes:
        graph: what is written into; inputs are added to it.
        updates: the new values of state, as results of the graph.
        ranks: how many sum, of which `rank` is this one.
        senders: how many of them send each other messages, of which `place` is this one.
        neighbours: how many sum before; 1 if not by level.
        near: this one's place among them.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        start: fx.Node,
        compression: Compression,
        rank: int,
        *,
        by_level: bool = False,
    ) -> None:
        self.graph, self.start, self.compression, self.rank = graph, start, compression, rank
        axis = axis_of(start)
        self.between = level(axis, INTER_NODE) if by_level else axis
        self.within = level(axis, INTRA_NODE)
        self.ranks, self.senders = graph.axes[axis], graph.axes[self.between]
        self.neighbours = self.ranks // self.senders
        self.place, self.near = divmod(rank, self.neighbours)
        self.operands: list[fx.Node] = list(start.args[0])  # type: ignore[arg-type]
        self.names = [str(r.meta["gradient"]) for r in results_of(start) if r is not None]
        self.scatters = start.target is start_reduce_scatter
        self.shapes = [tuple(tensors(node)[0].shape) for node in self.operands]
        self.dtype = tensors(self.operands[0])[0].dtype
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.updates: dict[OutputRole, fx.Node] = {}

    def run(self) -> None:
        """Replaces start, wait and results."""
        self.graph.graph.inserting_before(self.start)
        replace_collective(self.graph.graph, self.start, self.write())

    def write(self) -> list[fx.Node]:
        """Writes at the insertion point; returns what stands for each result."""
        raise NotImplementedError

    # Pieces.

    def inline(self, function: Any, *arguments: Any) -> Any:
        return inline(self.graph.graph, self.start, function, *arguments)

    def send(
        self, kind: Any, given: Sequence[fx.Node], *options: Any, over: str = ""
    ) -> tuple[fx.Node, list[Any]]:
        """A collective between senders, or over another axis; returns its wait, and its results."""
        axis = over or self.between
        if kind in (start_all_reduce, start_reduce_scatter):
            for operand in given:
                operand.meta["placement"] = Partial()
        found = collective(self.graph.graph, self.start, kind, given, *options, axis)
        done = found[0].args[0]
        assert isinstance(done, fx.Node)
        for node in (done.args[0], done, *found):
            node.meta["gradient"] = self.names[0]  # type: ignore[union-attr]
        return done, found

    def beside(self, done: fx.Node, function: Any, *arguments: Any) -> Any:
        """Computes what does not depend on `done`, while it is in flight."""
        with self.graph.graph.inserting_before(done):
            return self.inline(function, *arguments)

    def state(self, kind: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """The input that holds what is kept from step to step."""
        fake = fake_like(self.graph, tuple(shape), dtype)
        known_as = f"{kind}_{len(self.graph.inputs)}"
        self.graph, node = add_input(self.graph, State(kind, name), known_as, fake)
        node.meta["phase"] = "backward"
        return node

    def residuals(self) -> list[fx.Node]:
        """The unsent remainder of each operand; None without error feedback."""
        if not self.compression.feeds_back:
            return []
        pairs = zip(self.names, self.shapes, strict=True)
        return [self.state("residual", name, shape, self.wide) for name, shape in pairs]

    def begin(self, residuals: Sequence[fx.Node]) -> fx.Node:
        """The table of what this rank has to send: [a row for each part of it, width]."""
        table = self.inline(self.table, self.operands, residuals)
        if self.neighbours == 1:
            return table
        table = self.inline(self.by_neighbour, table)
        _, (own,) = self.send(start_reduce_scatter, [table], [1], over=self.within)
        return self.inline(lambda own: own.view(self.parts, self.width), own)

    def share(self, own: fx.Node) -> fx.Node:
        """Neighbours' results of an all-reduce, [rows, ...] each, concatenated."""
        if self.neighbours == 1:
            return own
        rows = self.neighbours * tensors(own)[0].shape[0]
        return self.send(start_all_gather, [own], [rows], over=self.within)[1][0]

    def end(
        self, whole: fx.Node, left: fx.Node | None, residuals: Sequence[fx.Node]
    ) -> list[fx.Node]:
        """Writes what was not sent into the residuals; returns what stands for each result.

        Args:
            whole: the sum: all parts of it for an all-reduce, own row for a reduce-scatter.
            left: the table of what this rank has not sent; None without feedback.
            residuals: where that goes.
        """
        if left is not None and self.neighbours > 1:
            left = self.inline(self.beside_neighbours, left)
        if left is not None:
            kept = self.inline(self.settle, left, whole, residuals)
            roles = (Update(State("residual", name)) for name in self.names)
            self.updates |= zip(roles, kept, strict=True)
        return list(self.inline(self.outcome, whole))

    # Between tensors and a table.

    @property
    def parts(self) -> int:
        """Rows of the table that a rank sends: row r is what sender r owns."""
        return self.senders

    def fit(self, width: int) -> int:
        """The least width of a table that can be sent and holds this one."""
        return width

    @property
    def sizes(self) -> list[int]:
        """Rows of dim 0 that each rank owns of each operand, where they are scattered."""
        return [math.ceil(shape[0] / self.ranks) for shape in self.shapes]

    @property
    def width(self) -> int:
        """Rows of the table."""
        if self.scatters:
            pairs = zip(self.sizes, self.shapes, strict=True)
            return self.fit(sum(size * math.prod(shape[1:]) for size, shape in pairs))
        rows = self.neighbours * self.parts
        return self.fit(math.ceil(sum(map(math.prod, self.shapes)) / rows))

    def table(self, given: Sequence[Tensor], residuals: Sequence[Tensor]) -> Tensor:
        """The operands and what was not sent of them, [all parts, width], zeros at the end.

        A reduce-scatter's has a row for each rank; an all-reduce's has those of a neighbour's part
        one behind the other.
        """
        pieces = [tensor.to(self.wide) for tensor in given]
        if residuals:
            pieces = [piece + left for piece, left in zip(pieces, residuals, strict=True)]
        if self.scatters:
            parts = [
                filled(piece, self.ranks * size).reshape(self.ranks, -1)
                for piece, size in zip(pieces, self.sizes, strict=True)
            ]
            missing = self.width - sum(part.shape[1] for part in parts)
            if missing:
                parts.append(parts[0].new_zeros((self.ranks, missing)))
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        rows = self.neighbours * self.parts
        flat = [piece.reshape(-1) for piece in pieces]
        if missing := rows * self.width - sum(piece.numel() for piece in flat):
            flat.append(flat[0].new_zeros(missing))
        return torch.cat(flat).view(rows, -1)

    def by_neighbour(self, table: Tensor) -> Tensor:
        """A row for each neighbour, of all that is its part, from a table of all parts."""
        if self.scatters:
            table = table.view(self.senders, self.neighbours, -1).transpose(0, 1)
        return table.reshape(self.neighbours, -1)

    def beside_neighbours(self, own: Tensor) -> Tensor:
        """The table of all parts in which neighbours' are zero."""
        none = torch.zeros_like(own)
        parts = [own if place == self.near else none for place in range(self.neighbours)]
        return torch.stack(parts, 1 if self.scatters else 0).flatten(0, 1)

    def pieces(self, table: Tensor) -> list[Tensor]:
        """The operands that lie in a table."""
        if self.scatters:
            found, at = [], 0
            for size, shape in zip(self.sizes, self.shapes, strict=True):
                wide = size * math.prod(shape[1:])
                part = table[:, at : at + wide].reshape(self.ranks * size, *shape[1:])
                found.append(part[: shape[0]])
                at += wide
            return found
        counts = [math.prod(shape) for shape in self.shapes]
        flat = table.reshape(-1)[: sum(counts)].split(counts)
        return [part.view(shape) for part, shape in zip(flat, self.shapes, strict=True)]

    def own_rows(self, row: Tensor) -> list[Tensor]:
        """The results of this rank that lie in its row of a table of chunks."""
        found, at = [], 0
        for size, shape in zip(self.sizes, self.shapes, strict=True):
            wide = size * math.prod(shape[1:])
            rows = chunk_rows(shape[0], self.ranks)[self.rank]
            part = row[at : at + wide].view(size, *shape[1:])[:rows]
            found.append(part.to(self.dtype).contiguous())
            at += wide
        return found

    def outcome(self, whole: Tensor) -> list[Tensor]:
        """The results: of an all-reduce from the whole table, of a reduce-scatter from own row."""
        if self.scatters:
            return self.own_rows(whole)
        return [piece.to(self.dtype) for piece in self.pieces(whole)]

    def settle(self, left: Tensor, whole: Tensor, residuals: Sequence[Tensor]) -> list[Tensor]:
        """Replaces the old residual by the new one, unless the sum overflowed."""
        fine = whole.sum().isfinite() & left.sum().isfinite()
        pairs = zip(residuals, self.pieces(left), strict=True)
        return [old.copy_(torch.where(fine, new, old)) for old, new in pairs]


def filled(tensor: Tensor, rows: int) -> Tensor:
    """A tensor with zeros behind its dim 0, up to so many rows."""
    missing = rows - tensor.shape[0]
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor
