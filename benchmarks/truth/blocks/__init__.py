"""Blocks by theme; importing this package registers all of them."""

from benchmarks.truth.blocks import (
    algebra,
    convolution,
    indices,
    memory,
    norms,
    order,
    plain,
    positions,
    recurrent,
    routing,
    segments,
    sequences,
    state,
    views,
    windows,
)

__all__ = [
    "algebra",
    "convolution",
    "indices",
    "memory",
    "norms",
    "order",
    "plain",
    "positions",
    "recurrent",
    "routing",
    "segments",
    "sequences",
    "state",
    "views",
    "windows",
]
