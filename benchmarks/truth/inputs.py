"""Inputs of a batch beside the hidden state, sampled by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from benchmarks.truth.registry import CLASSES, SIDE, STEPS_OF_TIME, WIDTH

Sampler = Callable[[int, Generator], Tensor]


def _normal(*shape: int) -> Sampler:
    return lambda rows, g: torch.randn(rows, *shape, generator=g, dtype=torch.float64)


def _uniform(low: float, high: float) -> Sampler:
    def sample(rows: int, g: Generator) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=g, dtype=torch.float64)

    return sample


def _integers(high: int, *shape: int) -> Sampler:
    return lambda rows, g: torch.randint(high, (rows, *shape), generator=g)


def _permutation(rows: int, g: Generator) -> Tensor:
    return torch.randperm(rows, generator=g)


def _labels(rows: int, g: Generator) -> Tensor:
    """Every class occurs: the first rows have one each."""
    drawn = torch.randint(CLASSES, (rows,), generator=g)
    drawn[:CLASSES] = torch.arange(CLASSES)[: min(rows, CLASSES)]
    return drawn[torch.randperm(rows, generator=g)]


def _ragged(rows: int, g: Generator) -> Tensor:
    """Labels, of which about a third is to be ignored; the first is not."""
    drawn = torch.randint(CLASSES, (rows,), generator=g)
    ignored = torch.rand(rows, generator=g) < 0.35
    ignored[0] = False
    return drawn.masked_fill(ignored, -100)


def _ragged_tokens(rows: int, g: Generator) -> Tensor:
    drawn = torch.randint(CLASSES, (rows, STEPS_OF_TIME), generator=g)
    lengths = torch.randint(1, STEPS_OF_TIME + 1, (rows, 1), generator=g)
    return drawn.masked_fill(torch.arange(STEPS_OF_TIME) >= lengths, -100)


def _edges(rows: int, g: Generator) -> Tensor:
    """As many edges as rows: dim 0 equals the batch, entries are rows of it."""
    return torch.randint(rows, (rows, 2), generator=g)


def _pair_mask(rows: int, g: Generator) -> Tensor:
    mask = torch.rand(rows, rows, generator=g) < 0.5
    return mask | torch.eye(rows, dtype=torch.bool)


def _groups(rows: int, g: Generator) -> Tensor:
    """A sorted segment of every row."""
    return _labels(rows, g).sort().values


SAMPLERS: dict[str, Sampler] = {
    "x": _normal(WIDTH),
    "tokens": _integers(11, STEPS_OF_TIME),
    "frames": _normal(STEPS_OF_TIME, WIDTH),
    "pixels": _normal(WIDTH, SIDE, SIDE),
    "target": _normal(WIDTH),
    "scores": _normal(),
    "labels": _labels,
    "ragged": _ragged,
    "ragged_tokens": _ragged_tokens,
    "groups": _groups,
    "weights": _uniform(0.1, 2.0),
    "mixing": _uniform(0.0, 1.0),
    "noise": _normal(WIDTH),
    "lengths": lambda rows, g: torch.randint(1, STEPS_OF_TIME + 1, (rows,), generator=g),
    "keep": lambda rows, g: _ragged(rows, g) >= 0,
    "permutation": _permutation,
    "edges": _edges,
    "pair_mask": _pair_mask,
}


def sample(names: tuple[str, ...], rows: int, seed: int) -> dict[str, Tensor]:
    """The inputs of one batch, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: SAMPLERS[name](rows, generator) for name in names}
