"""`CompressedReduce`: the base class of the algorithms that sum a bucket compressed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.mesh_levels import INTER_NODE, INTRA_NODE, level
from autopar.core.ir.placement import Partial, chunk_of
from autopar.core.ir.roles import OutputRole, State, Update
from autopar.core.plan.compression import Compression
from autopar.passes.core.collective_ops import (
    annotate,
    axis_of,
    collective,
    replace_collective,
    results_of,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from autopar.passes.core.node_builder import add_input, fake_like, inline


class CompressedReduce(ABC):
    """Replaces one all-reduce or reduce-scatter by compressed messages.

    With `by_level`, the ranks of a node first reduce-scatter the bucket uncompressed. Each part is
    then summed compressed, between the ranks of all nodes that own it. An all-reduce ends with an
    all-gather within the node. The owner of a part keeps the residual of that part.

    Attributes:
        splits: whether each rank sums a part of an all-reduce, and not all of it.
        graph: graph to rewrite; state becomes new inputs.
        updates: nodes with the new values of state, by output role.
        ranks: number of ranks that sum.
        rank: this rank's coordinate among `ranks`.
        senders: number of ranks that exchange compressed messages.
        place: this rank's coordinate among `senders`.
        neighbours: number of ranks that first sum uncompressed; 1 unless `by_level`.
        near: this rank's coordinate among `neighbours`.
        wide: dtype of sums and residuals, float32 or wider.
    """

    splits = True

    def __init__(
        self,
        graph: TrainingGraph,
        start: fx.Node,
        compression: Compression,
        rank: int,
        by_level: bool,
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
        self.graph.graph.inserting_before(self.start)
        replace_collective(self.graph.graph, self.start, self.write())

    @abstractmethod
    def write(self) -> list[fx.Node]:
        """Writes the algorithm at the insertion point; returns a node for each result."""

    # Steps of `write`.

    def inline(self, function: Any, *arguments: Any) -> Any:
        return inline(self.graph.graph, self.start, function, *arguments)

    def send(
        self, kind: Any, given: Sequence[fx.Node], *options: Any, over: str = ""
    ) -> tuple[fx.Node, list[Any]]:
        """Writes a collective over the senders or the axis `over`; returns its wait and results."""
        axis = over or self.between
        # Inlined nodes are Varying, which the verifier refuses to reduce-scatter. Here they are
        # parts of a sum.
        if kind in (start_all_reduce, start_reduce_scatter):
            for operand in given:
                operand.meta["placement"] = Partial()
        found = collective(self.graph.graph, self.start, kind, given, *options, axis)
        annotate(found, gradient=self.names[0])
        return found[0].all_input_nodes[0], found

    def beside(self, done: fx.Node, function: Any, *arguments: Any) -> Any:
        """Inlines `function` before the wait `done`, to run while the collective is in flight."""
        with self.graph.graph.inserting_before(done):
            return self.inline(function, *arguments)

    def state(self, kind: str, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        fake = fake_like(self.graph, tuple(shape), dtype)
        known_as = f"{kind}_{len(self.graph.inputs)}"
        self.graph, node = add_input(self.graph, State(kind, name), known_as, fake)
        node.meta["phase"] = "backward"
        return node

    def residuals(self, which: Iterable[int]) -> list[fx.Node]:
        """Residuals of some operands; empty without error feedback."""
        if not self.compression.feeds_back:
            return []
        return [self.state("residual", self.names[i], self.shapes[i], self.wide) for i in which]

    def update(self, kind: str, names: Iterable[str], values: Iterable[fx.Node]) -> None:
        self.updates |= {Update(State(kind, n)): v for n, v in zip(names, values, strict=True)}

    def begin(self, residuals: Sequence[fx.Node]) -> fx.Node:
        """Table of the values that this rank sends: [parts, width]."""
        table = self.inline(self.table, self.operands, residuals)
        if self.neighbours == 1:
            return table
        table = self.inline(self.by_neighbour, table)
        _, (own,) = self.send(start_reduce_scatter, [table], [1], over=self.within)
        return self.inline(lambda own: own.view(self.parts, self.width), own)

    def share(self, own: fx.Node) -> fx.Node:
        """All-gathers the result [rows, ...] of each neighbour: [neighbours * rows, ...]."""
        if self.neighbours == 1:
            return own
        rows = self.neighbours * tensors(own)[0].shape[0]
        return self.send(start_all_gather, [own], [rows], over=self.within)[1][0]

    def end(
        self, whole: fx.Node, left: fx.Node | None, residuals: Sequence[fx.Node]
    ) -> list[fx.Node]:
        """Updates the residuals by this rank's errors `left`; returns a node for each result."""
        if left is not None and self.neighbours > 1:
            left = self.inline(self.beside_neighbours, left)
        if left is not None:
            kept = self.inline(self.settle, left, whole, residuals)
            self.update("residual", self.names, kept)
        return list(self.inline(self.outcome, whole))

    # Conversion between tensors and tables.

    @property
    def parts(self) -> int:
        """Number of rows in the table that a rank sends; sender r owns row r if there are more."""
        return self.senders if self.splits or self.scatters else 1

    def fit(self, width: int) -> int:
        """Least width, at or above `width`, that the algorithm can send."""
        return width

    @property
    def sizes(self) -> list[int]:
        """Padded number of rows of each operand that a rank owns after a reduce-scatter."""
        return [math.ceil(shape[0] / self.ranks) for shape in self.shapes]

    @property
    def width(self) -> int:
        if self.scatters:
            pairs = zip(self.sizes, self.shapes, strict=True)
            return self.fit(sum(size * math.prod(shape[1:]) for size, shape in pairs))
        rows = self.neighbours * self.parts
        return self.fit(math.ceil(sum(map(math.prod, self.shapes)) / rows))

    def table(self, given: Sequence[Tensor], residuals: Sequence[Tensor]) -> Tensor:
        """Sums of operands and residuals, zero-padded: [neighbours * parts, width].

        A reduce-scatter has one row for each rank; in an all-reduce, a neighbour's are consecutive.
        """
        pieces = [tensor.to(self.wide) for tensor in given]
        if residuals:
            pieces = [piece + left for piece, left in zip(pieces, residuals, strict=True)]
        if self.scatters:
            parts = [
                filled(piece, self.ranks * size).reshape(self.ranks, -1)
                for piece, size in zip(pieces, self.sizes, strict=True)
            ]
            if missing := self.width - sum(part.shape[1] for part in parts):
                parts.append(parts[0].new_zeros((self.ranks, missing)))
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        rows = self.neighbours * self.parts
        flat = [piece.reshape(-1) for piece in pieces]
        if missing := rows * self.width - sum(piece.numel() for piece in flat):
            flat.append(flat[0].new_zeros(missing))
        return torch.cat(flat).view(rows, -1)

    def by_neighbour(self, table: Tensor) -> Tensor:
        """Regroups a whole table into one row per neighbour, its part: [neighbours, -1]."""
        if self.scatters:
            table = table.view(self.senders, self.neighbours, -1).transpose(0, 1)
        return table.reshape(self.neighbours, -1)

    def beside_neighbours(self, own: Tensor) -> Tensor:
        """Whole table with this rank's part from `own` and zeros elsewhere."""
        none = torch.zeros_like(own)
        parts = [own if place == self.near else none for place in range(self.neighbours)]
        return torch.stack(parts, 1 if self.scatters else 0).flatten(0, 1)

    def pieces(self, table: Tensor) -> list[Tensor]:
        """Splits a whole table into tensors with the operands' shapes."""
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

    def outcome(self, whole: Tensor) -> list[Tensor]:
        """Results, from the whole table of an all-reduce or the own row of a reduce-scatter."""
        if not self.scatters:
            return [piece.to(self.dtype) for piece in self.pieces(whole)]
        found, at = [], 0
        for size, shape in zip(self.sizes, self.shapes, strict=True):
            wide = size * math.prod(shape[1:])
            rows = chunk_of(shape[0], self.ranks, self.rank)[1]
            part = whole[at : at + wide].view(size, *shape[1:])[:rows]
            found.append(part.to(self.dtype).contiguous())
            at += wide
        return found

    def settle(self, left: Tensor, whole: Tensor, residuals: Sequence[Tensor]) -> list[Tensor]:
        """Updates the residuals in place, unless the sum or `left` is not finite."""
        # GradScaler skips such a step. A NaN in a residual would come back in all later steps.
        fine = whole.sum().isfinite() & left.sum().isfinite()
        pairs = zip(residuals, self.pieces(left), strict=True)
        return [old.copy_(torch.where(fine, new, old)) for old, new in pairs]


def filled(tensor: Tensor, rows: int) -> Tensor:
    """Pads dim 0 of a tensor with zeros to `rows` rows."""
    missing = rows - tensor.shape[0]
    return F.pad(tensor, [0, 0] * (tensor.dim() - 1) + [0, missing]) if missing else tensor
