"""`GlooLowering`: gathers and reduce-scatters on gloo, as all-to-alls without the own chunk.

Gloo runs a reduce-scatter as an all-reduce and keeps one chunk of the result. For 16 MiB between 2
ranks (torch 2.13, loopback), it takes 20 ms, an all-gather 16 ms, and an all-to-all 5 ms. Large
messages go in pieces (see `cost_model.algorithms.gloo_chunks`).

All-reduces stay gloo's own, since all-to-alls and several groups are no faster. Gloo sums each
chunk on one rank and sends it to the others, so all ranks get identical bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from autopar.core.gloo_chunks import gloo_chunks
from autopar.core.ir.graph import tensors
from autopar.passes.communication.lower_functional import Begun, Lowering, c10d
from autopar.passes.core.collective_ops import is_uneven
from autopar.passes.core.node_builder import aten


@dataclass(frozen=True)
class Segment:
    """A range of elements of a rank's flat chunk of one operand."""

    operand: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class GlooLowering(Lowering):
    """Lowers one collective for gloo."""

    def all_gather(self) -> Begun:
        """Sends this rank's chunks to every other rank and concatenates those received."""
        own = self.padded_chunks()
        shapes = [[self.ranks * size, *rest] for size, *rest in (tensors(x)[0].shape for x in own)]
        flat = [self.flat(x) for x in own]
        pieces = self.pieces(flat)
        issued = []
        for piece in pieces:
            sent = self.joined([self.part(flat[s.operand], s.begin, s.size) for s in piece])
            if self.ranks > 2:
                sent = self.op(aten.repeat.default, sent, [self.ranks - 1])
            issued.append(self.exchange(sent, len(pieces)))
        return issued, lambda *done: self.gathered(pieces, done, flat, shapes)

    def reduce_scatter(self) -> Begun:
        """Sends every other rank its chunks and adds those received to this rank's own."""
        padded, shapes = self.padded_wholes()
        chunks = [
            [self.chunk(x, rank, shape[0]) for x, shape in zip(padded, shapes, strict=True)]
            for rank in range(self.ranks)
        ]
        own = chunks.pop(self.rank)
        flat = [[self.flat(x) for x in group] for group in chunks]
        pieces = self.pieces(flat[0])

        def finish(*done: fx.Node) -> Iterator[fx.Node]:
            totals: list[list[fx.Node]] = [[] for _ in own]
            for piece, total in zip(pieces, done, strict=True):
                if self.ranks > 2:
                    table = self.op(aten.view.default, total, [self.ranks - 1, -1])
                    total = self.op(aten.sum.dim_IntList, table, [0])
                for segment, part in zip(piece, self.parts(total, piece), strict=True):
                    totals[segment.operand].append(part)
            for parts, mine, shape in zip(totals, own, shapes, strict=True):
                total = self.op(aten.view.default, self.joined(parts), shape)
                yield self.op(aten.add_.Tensor, total, mine)

        return self.exchanges(pieces, flat), finish

    def all_to_all(self) -> Begun:
        """Sends every other rank its chunks and concatenates those received, by rank."""
        if is_uneven(self.start):
            return self.exchange_rows()
        shapes = [list(tensors(x)[0].shape) for x in self.operands]
        wholes = [self.contiguous(x) for x in self.operands]
        chunks = [
            [self.flat(self.chunk(x, rank, tensors(x)[0].shape[0] // self.ranks)) for x in wholes]
            for rank in range(self.ranks)
        ]
        own = chunks.pop(self.rank)
        pieces = self.pieces(own)
        issued = self.exchanges(pieces, chunks)
        return issued, lambda *done: self.gathered(pieces, done, own, shapes)

    def permute(self) -> Begun:
        """Sends one rank all tensors, and receives those of one, in pieces."""
        flat = [self.flat(x) for x in self.operands]
        shapes = [list(tensors(x)[0].shape) for x in self.operands]
        pieces, issued = self.pieces(flat), []
        for piece in pieces:
            parts = [self.part(flat[s.operand], s.begin, s.size) for s in piece]
            issued.append(self.send(self.joined(parts)))
            issued[-1].meta["pieces"] = len(pieces)

        def finish(*done: fx.Node) -> Iterator[fx.Node]:
            arrived: list[list[fx.Node]] = [[] for _ in shapes]
            for piece, message in zip(pieces, done, strict=True):
                for segment, part in zip(piece, self.parts(message, piece), strict=True):
                    arrived[segment.operand].append(part)
            for parts, shape in zip(arrived, shapes, strict=True):
                yield self.op(aten.view.default, self.joined(parts), shape)

        return issued, finish

    # Pieces.

    def pieces(self, chunks: Sequence[fx.Node]) -> list[list[Segment]]:
        """Cuts the flat chunks of one rank into the pieces of successive messages."""
        fakes = [tensors(x)[0] for x in chunks]
        sizes = [fake.numel() for fake in fakes]
        nbytes = sum(sizes) * fakes[0].element_size() * self.ranks
        return cut_evenly(sizes, gloo_chunks(nbytes, self.ranks))

    def exchanges(
        self, pieces: list[list[Segment]], chunks: Sequence[Sequence[fx.Node]]
    ) -> list[fx.Node]:
        """Sends each piece of the flat chunks of every other rank."""
        issued = []
        for piece in pieces:
            parts = [self.part(g[s.operand], s.begin, s.size) for g in chunks for s in piece]
            issued.append(self.exchange(self.joined(parts), len(pieces)))
        return issued

    def exchange(self, sent: fx.Node, pieces: int) -> fx.Node:
        """Writes one of `pieces` all-to-alls, with an equal part for every other rank."""
        part = tensors(sent)[0].numel() // (self.ranks - 1)
        splits = [0 if rank == self.rank else part for rank in range(self.ranks)]
        node = self.op(c10d.all_to_all_single.default, sent, splits, splits, self.axis)
        node.meta["pieces"] = pieces
        return node

    def gathered(
        self,
        pieces: list[list[Segment]],
        done: Sequence[fx.Node],
        own: Sequence[fx.Node],
        shapes: Sequence[Sequence[int]],
    ) -> Iterator[fx.Node]:
        """Concatenates the received chunks and this rank's `own`, by rank."""
        found: list[list[list[fx.Node]]] = [[[] for _ in own] for _ in range(self.ranks)]
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        for piece, table in zip(pieces, done, strict=True):
            every = [segment for _ in others for segment in piece]
            owners = [rank for rank in others for _ in piece]
            for rank, segment, part in zip(owners, every, self.parts(table, every), strict=True):
                found[rank][segment.operand].append(part)
        for index, shape in enumerate(shapes):
            parts = [x for mine in found for x in mine[index] or [own[index]]]
            yield self.op(aten.view.default, self.op(aten.cat.default, parts), list(shape))

    def parts(self, flat: fx.Node, segments: Sequence[Segment]) -> list[fx.Node]:
        offsets = accumulate((s.size for s in segments), initial=0)
        return [self.part(flat, at, s.size) for at, s in zip(offsets, segments, strict=False)]

    def part(self, flat: fx.Node, begin: int, size: int) -> fx.Node:
        if tensors(flat)[0].numel() == size:
            return flat
        return self.op(aten.slice.Tensor, flat, 0, begin, begin + size)

    def chunk(self, node: fx.Node, rank: int, rows: int) -> fx.Node:
        return self.op(aten.slice.Tensor, node, 0, rank * rows, (rank + 1) * rows)


def cut_evenly(sizes: Sequence[int], count: int) -> list[list[Segment]]:
    """Cuts concatenated operands of `sizes` elements into `count` pieces of equal size.

    >>> [[(s.operand, s.begin, s.end) for s in piece] for piece in cut_evenly([5, 3], 2)]
    [[(0, 0, 4)], [(0, 4, 5), (1, 0, 3)]]
    """
    total = sum(sizes)
    bounds = [total * piece // count for piece in range(count + 1)]
    starts = [0, *accumulate(sizes)]
    found = []
    for begin, end in pairwise(bounds):
        piece = []
        for operand, (start, size) in enumerate(zip(starts, sizes, strict=False)):
            first, last = max(begin - start, 0), min(end - start, size)
            if first < last or (size == 0 and end == total):  # empty ones go into the last piece
                piece.append(Segment(operand, min(first, size), last))
        found.append(piece)
    return found
