"""Blocks and losses by theme; importing this package registers all of them."""

from benchmarks.truth.blocks import (  # noqa: F401  # noqa: F401  # noqa: F401
    algebra,
    images,
    indices,
    losses_of_pairs,
    losses_of_rows,
    losses_of_tokens,
    norms,
    plain,
    regrouping,
    routing,
    sequences,
    state,
)
