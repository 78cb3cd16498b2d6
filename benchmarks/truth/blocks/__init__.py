"""Blocks by theme; importing this package registers all of them."""

from benchmarks.truth.blocks import (
    contrast,
    convolution,
    indices,
    losses,
    norms,
    order,
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
    "contrast",
    "convolution",
    "indices",
    "losses",
    "norms",
    "order",
    "positions",
    "recurrent",
    "routing",
    "segments",
    "sequences",
    "state",
    "views",
    "windows",
]
