"""`chunked`: configurations that fit because logits and their loss are computed in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.passes.chunks.row_search import HEADS
from autopar.planner.evaluate.candidate import Candidate, CandidateConfig
from autopar.planner.offload_choices import ConfigSearch

LOSS_CHUNKS = (2, 8, 32)
"""Numbers of chunks that the planner tries, in order of decreasing memory."""


def chunked(search: ConfigSearch, config: CandidateConfig) -> Iterator[Candidate | None]:
    """Candidates with the loss in chunks.

    The fewest chunks that fit come alone; if none do, the fewest beyond two that fit with
    recomputation.
    """
    variants = _variants(search, config)
    for variant in variants:
        if search.fits(search.evaluate(variant)):
            yield search.evaluate(variant)
            return
    for variant in variants[1:]:
        yield (found := search.raised_levels(variant))
        if found is not None:
            return


def least_bytes(search: ConfigSearch, config: CandidateConfig, enough: int) -> int:
    """Bytes that a configuration needs; those with the most chunks, unless `enough` suffice."""
    whole = search.evaluate(config).needed_bytes
    variants = _variants(search, config)
    if whole <= enough or not variants:
        return whole
    return min(whole, search.evaluate(variants[-1]).needed_bytes)


def _variants(search: ConfigSearch, config: CandidateConfig) -> Sequence[CandidateConfig]:
    """A configuration with each number of chunks that may be tried."""
    strategy, setup = search.strategy, search.setup
    if strategy.loss_chunks is not None or config.loss_chunks > 1:
        return ()
    counts = loss_chunks(setup.graph, setup.base.model_parallel_size)
    return tuple(replace(config, loss_chunks=count) for count in counts)


def loss_chunks(graph: TrainingGraph, ranks: int) -> tuple[int, ...]:
    """Numbers of chunks for the largest product outside of blocks.

    Of so few rows that a chunk may be empty, and so few columns that one of `ranks` may have a
    single one, there are none.
    """
    if graph.backward_start.op == "output":
        return ()
    heads = (n for n in graph.calls() if n.target in HEADS and n.meta["phase"] == "forward")
    shapes = [tensors(head)[0].shape for head in heads if not head.meta["block"]]
    rows, columns = max(shapes, key=lambda shape: shape.numel(), default=(0, 0))
    if columns < _least(ranks):
        return ()
    return tuple(count for count in LOSS_CHUNKS if rows >= ranks * _least(count))


def _least(parts: int) -> int:
    """Elements of which torch.chunk makes so many parts of two or more."""
    return 2 * parts * (parts + 1)
