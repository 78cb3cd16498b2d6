"""Blocks by theme; importing this package registers all of them."""

from benchmarks.truth.blocks import (
    contrast,
    convolution,
    dense,
    indices,
    losses,
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
    "contrast",
    "convolution",
    "dense",
    "indices",
    "losses",
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
