"""Losses by theme; importing this package registers all of them."""

from benchmarks.truth.heads import (
    clusters,
    contrast,
    dense,
    means,
    ranking,
)

__all__ = [
    "clusters",
    "contrast",
    "dense",
    "means",
    "ranking",
]
