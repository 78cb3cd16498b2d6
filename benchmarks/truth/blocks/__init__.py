"""Blocks and losses by theme; importing this package registers all of them."""

from benchmarks.truth.blocks import (  # noqa: F401  # noqa: F401
    algebra,
    images,
    indices,
    losses,
    norms,
    plain,
    regrouping,
    routing,
    sequences,
    state,
)
