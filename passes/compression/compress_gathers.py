"""Compresses gathers of parameters, bucket by bucket.

ZeRO 3 gathers almost every parameter in the forward and again in the backward. Over slow links,
smaller messages shorten both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autopar.core.ir.graph import GraphProperty, TrainingGraph, tensors
from autopar.core.plan.buckets import Group
from autopar.core.plan.compression import Compression
from autopar.passes.compression.codecs import Codec, codec
from autopar.passes.compression.compressed_reduce import filled
from autopar.passes.core.collective_ops import (
    axis_of,
    collective,
    replace_collective,
    results_of,
    start_all_gather,
    starts,
)
from autopar.passes.core.node_builder import inline
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class CompressGathers(Pass):
    """Compresses the gathers of parameter buckets, as ZeRO++ does with quantized weights.

    Before: each gather sends the parameters of a bucket in their own type. After: each rank
    encodes its chunks and decodes the chunks of all ranks, its own included, so that all ranks
    compute with the same parameters. The stored chunks stay exact. Fields have the parameter names
    and `Compression` text of each bucket of the forward, and of the backward. Tier: lossy.
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
            floats = all(tensor.is_floating_point() for tensor in tensors(start))
            if axis_of(start) in graph.partitioned:
                continue  # compressed over the data axis alone, so that they are rounded once
            if start.target is start_all_gather and text and floats:
                _compress(graph, start, codec(Compression.of(text)))
                done = True
        return PassResult(graph, "" if done else "no gather is compressed")


def _compress(graph: TrainingGraph, start: fx.Node, codec_: Codec) -> None:
    """Replaces the start, the wait and the results of one gather."""
    axis, given = axis_of(start), list[fx.Node](start.args[0])  # type: ignore[arg-type]
    ranks, rows = graph.axes[axis], list[int](start.args[1])  # type: ignore[arg-type]
    fakes = [tensors(node)[0] for node in given]
    sizes = [math.ceil(n / ranks) for n in rows]
    widths = [n * math.prod(t.shape[1:]) for n, t in zip(sizes, fakes, strict=True)]
    width = codec_.fit(sum(widths))

    def message(chunks: Sequence[Tensor]) -> Tensor:
        pairs = zip(chunks, sizes, strict=True)
        row = torch.cat([filled(chunk, size).reshape(-1) for chunk, size in pairs])
        return codec_.encode(filled(row, width).unsqueeze(0))

    def whole(messages: Tensor) -> list[Tensor]:
        table = codec_.decode(messages, width, fakes[0].dtype)
        parts = zip(table[:, : sum(widths)].split(widths, 1), rows, fakes, strict=True)
        return [part.reshape(-1, *t.shape[1:])[:n] for part, n, t in parts]

    graph.graph.inserting_before(start)
    sent = inline(graph.graph, start, message, given)
    came = collective(graph.graph, start, start_all_gather, [sent], [ranks], axis)
    replace_collective(graph.graph, start, inline(graph.graph, start, whole, *came))
