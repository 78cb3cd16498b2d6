"""Inputs of a batch, sampled by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from benchmarks.truth.registry import CLASSES, SIDE, TIME_STEPS, WIDTH

Sampler = Callable[[int, Generator], Tensor]  # makes one input for a number of rows

IGNORED = -100


def _normal(*shape: int) -> Sampler:
    return lambda rows, g: torch.randn(rows, *shape, generator=g, dtype=torch.float64)


def _uniform(low: float, high: float) -> Sampler:
    return lambda rows, g: torch.empty(rows, dtype=torch.float64).uniform_(low, high, generator=g)


def _labels(rows: int, g: Generator) -> Tensor:
    """Labels in which every class occurs."""
    labels = torch.randint(CLASSES, (rows,), generator=g)
    labels[:CLASSES] = torch.arange(CLASSES)[: min(rows, CLASSES)]
    return labels[torch.randperm(rows, generator=g)]


def _ragged(rows: int, g: Generator) -> Tensor:
    """Labels, of which about a third is ignored, but not the first."""
    labels = torch.randint(CLASSES, (rows,), generator=g)
    ignored = torch.rand(rows, generator=g) < 0.35
    ignored[0] = False
    return labels.masked_fill(ignored, IGNORED)


def _ragged_tokens(rows: int, g: Generator) -> Tensor:
    labels = torch.randint(CLASSES, (rows, TIME_STEPS), generator=g)
    lengths = torch.randint(1, TIME_STEPS + 1, (rows, 1), generator=g)
    return labels.masked_fill(torch.arange(TIME_STEPS) >= lengths, IGNORED)


def _pair_mask(rows: int, g: Generator) -> Tensor:
    return (torch.rand(rows, rows, generator=g) < 0.5) | torch.eye(rows, dtype=torch.bool)


SAMPLERS: dict[str, Sampler] = {
    "x": _normal(WIDTH),
    "tokens": lambda rows, g: torch.randint(11, (rows, TIME_STEPS), generator=g),
    "frames": _normal(TIME_STEPS, WIDTH),
    "pixels": _normal(WIDTH, SIDE, SIDE),
    "target": _normal(WIDTH),
    "noise": _normal(WIDTH),
    "scores": _normal(),
    "weights": _uniform(0.1, 2.0),
    "mixing": _uniform(0.0, 1.0),
    "labels": _labels,
    "groups": lambda rows, g: _labels(rows, g).sort().values,
    "ragged": _ragged,
    "ragged_tokens": _ragged_tokens,
    "keep": lambda rows, g: _ragged(rows, g) != IGNORED,
    "lengths": lambda rows, g: torch.randint(1, TIME_STEPS + 1, (rows,), generator=g),
    "permutation": lambda rows, g: torch.randperm(rows, generator=g),
    "edges": lambda rows, g: torch.randint(rows, (rows, 2), generator=g),
    "pair_mask": _pair_mask,
}

ROW_NUMBERS = frozenset({"permutation", "edges", "pair_mask"})
"""Inputs that refer to rows of the batch by number."""


def sample(names: Sequence[str], rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: SAMPLERS[name](rows, generator) for name in names}
