"""Blocks and losses by theme; importing this package registers all of them."""

from benchmarks.truth.blocks import (
    algebra,
    images,
    indices,
    losses_of_distributions,
    losses_of_pairs,
    losses_of_rows,
    losses_of_tokens,
    norms,
    order,
    plain,
    regrouping,
    routing,
    sequences,
    state,
)

__all__ = [
    "algebra",
    "images",
    "indices",
    "losses_of_distributions",
    "losses_of_pairs",
    "losses_of_rows",
    "losses_of_tokens",
    "norms",
    "order",
    "plain",
    "regrouping",
    "routing",
    "sequences",
    "state",
]
