"""Configurations that follow from a strategy alone."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.plan.buckets import BUCKET_BYTES
from autopar.plan.compression import Compression
from autopar.plan.strategy import Strategy
from autopar.planner.evaluate.candidate import CandidateConfig


def fixed_config(strategy: Strategy, blocks: Sequence[str]) -> CandidateConfig | None:
    """The configuration of a strategy that leaves nothing to search; None if it leaves anything."""
    fixed: list[object]
    fixed = [strategy.zero, strategy.recompute, strategy.gather_bytes, strategy.reduce_bytes]
    if strategy.stages > 1:
        interleaved = (strategy.stages_per_rank or 1) > 1
        fixed += [strategy.micro_batches, strategy.schedule or interleaved or None]
    open_to_loss = strategy.compress is None and strategy.lossy
    if open_to_loss or any(value is None for value in fixed):
        return None
    return default_config(strategy, blocks, 0)


def default_config(strategy: Strategy, blocks: Sequence[str], zero_stage: int) -> CandidateConfig:
    """The configuration of a strategy, with defaults for everything that it leaves open.

    Args:
        strategy: choices that the user fixed.
        blocks: names of the model's blocks.
        zero_stage: ZeRO stage of the blocks for which the strategy names none.
    """
    if isinstance(strategy.zero, int):
        zero_stages = dict.fromkeys(blocks, strategy.zero)
    else:
        zero_stages = {**dict.fromkeys(blocks, zero_stage), **(strategy.zero or {})}
    return CandidateConfig(
        zero_stages=tuple((block, zero_stages[block]) for block in blocks),
        recompute=tuple((block, strategy.recompute or "none") for block in blocks),
        gather_bytes=strategy.gather_bytes or BUCKET_BYTES,
        reduce_bytes=strategy.reduce_bytes or BUCKET_BYTES,
        prefetch=1 if strategy.prefetch is None else strategy.prefetch,
        compress=(compression_of(strategy.compress),),
        compress_gathers=compression_of(strategy.compress_gathers),
        compress_activations=compression_of(strategy.compress_activations),
        hierarchical=bool(strategy.hierarchical),
    )


def compression_of(method: str | Compression | None) -> str:
    """A compression as a plan writes it; "" for none."""
    return "" if method in (None, "none") else str(Compression.of(method))
