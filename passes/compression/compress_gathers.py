"""Compresses gathers of parameters, bucket by bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.ir.graph import GraphProperty, TrainingGraph, tensors
from autopar.passes.compression.codecs import codec
from autopar.passes.compression.compressed_reduce import filled
from autopar.passes.core.collective_ops import (
    axis_of,
    collective,
    replace_collective,
    results_of,
    start_all_gather,
    starts,
)
from autopar.passes.core.inline import inline
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.plan.buckets import Group
from autopar.plan.compression import Compression


@dataclass(frozen=True)
class CompressGathers(Pass):
    """Compresses the gathers of parameter buckets, as ZeRO++ does with quantized weights.

    Before: each gather sends the parameters of a bucket in their own type. After: each rank
    encodes its chunks and decodes the chunks of all ranks, its own included, so that all ranks
    compute with the same parameters. The stored chunks stay exact. Tier: lossy.

    Attributes:
        gather: parameter names and `Compression` text of each bucket compressed in the forward.
        regather: parameter names and `Compression` text of each bucket compressed in the backward.
    """

    gather: tuple[tuple[Group, str], ...]
    regather: tuple[tuple[Group, str], ...]
    tier = "lossy"
    requires = frozenset({GraphProperty.COLLECTIVES_BUCKETED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph, done = graph.copy(), False
        buckets = {"forward": self.gather, "backward": self.regather}
        chosen = {
            (phase, name): text
            for phase, groups in buckets.items()
            for names, text in groups
            for name in names
        }
        for start in list(starts(graph)):
            names = [r.meta.get("gathered", "") for r in results_of(start) if r is not None]
            text = chosen.get((start.meta["phase"], names[0])) if names else None
            given = [tensors(node)[0] for node in start.args[0]]  # type: ignore[union-attr,arg-type]
            floats = all(tensor.is_floating_point() for tensor in given)
            if start.target is start_all_gather and text and floats:
                _Gather(graph, start, Compression.of(text)).run()
                done = True
        return PassResult(graph, "" if done else "no gather is compressed")


class _Gather:
    """Compresses one gather."""

    def __init__(self, graph: TrainingGraph, start: fx.Node, compression: Compression) -> None:
        self.graph, self.start, self.codec = graph.graph, start, codec(compression)
        self.ranks = graph.axes[axis_of(start)]
        self.chunks: list[fx.Node] = list(start.args[0])  # type: ignore[arg-type]
        self.rows: list[int] = list(start.args[1])  # type: ignore[arg-type]
        self.rests = [tuple(tensors(node)[0].shape[1:]) for node in self.chunks]
        self.dtype = tensors(self.chunks[0])[0].dtype
        self.sizes = [math.ceil(rows / self.ranks) for rows in self.rows]

    def run(self) -> None:
        """Replaces the start, the wait and the results."""
        self.graph.inserting_before(self.start)
        message = inline(self.graph, self.start, self.message, self.chunks)
        axis = axis_of(self.start)
        came = collective(self.graph, self.start, start_all_gather, [message], [self.ranks], axis)
        replace_collective(
            self.graph, self.start, inline(self.graph, self.start, self.whole, *came)
        )

    def message(self, chunks: Sequence[Tensor]) -> Tensor:
        """Encodes this rank's chunks as one message."""
        pairs = zip(chunks, self.sizes, strict=True)
        row = torch.cat([filled(chunk, size).reshape(-1) for chunk, size in pairs])
        return self.codec.encode(filled(row, self.codec.fit(len(row))).unsqueeze(0))

    def whole(self, messages: Tensor) -> list[Tensor]:
        """Decodes the messages of all ranks into whole parameters."""
        widths = [size * math.prod(rest) for size, rest in zip(self.sizes, self.rests, strict=True)]
        table = self.codec.decode(messages, self.codec.fit(sum(widths)), self.dtype)
        parts = zip(table[:, : sum(widths)].split(widths, 1), self.rows, self.rests, strict=True)
        return [part.reshape(-1, *rest)[:rows] for part, rows, rest in parts]
