"""A model with fewer of its repeated blocks: what all of it takes follows from what a few take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from autopar.capture.repeated_blocks import BlockKind, RepeatedBlocks
from autopar.planner.search.mesh_estimate import Figures

KEPT = 2
"""Blocks of each kind that are left: what the first does apart, with the next as its neighbour."""


def kinds_of(model: nn.Module, blocks: Sequence[str]) -> list[BlockKind]:
    """The kinds of equal blocks, each of more than it takes to see how figures grow."""
    return [kind for kind in RepeatedBlocks(model, blocks).kinds if len(kind.modules) > KEPT + 1]


@contextlib.contextmanager
def with_num_layers(
    model: nn.Module, kinds: Sequence[BlockKind], kept: Sequence[int]
) -> Iterator[None]:
    """Takes all but so many blocks of each kind out of a model, and puts them back."""
    gone = {
        id(modules[0])
        for kind, count in zip(kinds, kept, strict=True)
        for modules in kind.modules[count:]
    }
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    before = [(each, each._modules) for each in lists]
    try:
        for each in lists:
            left = [child for child in each if id(child) not in gone]
            each._modules = {str(place): child for place, child in enumerate(left)}
        yield
    finally:
        for each, modules in before:
            each._modules = modules


def extrapolate_layers(
    kinds: Sequence[BlockKind], at: Callable[[Sequence[int]], Figures]
) -> Figures:
    """Figures of a whole model, from those of models with few blocks.

    Args:
        kinds: of its equal blocks.
        at: the figures of the model with so many blocks of each kind.
    """
    few = [KEPT] * len(kinds)
    found = first = at(few)
    for place, kind in enumerate(kinds):
        more = at([*few[:place], KEPT + 1, *few[place + 1 :]])
        found = found + (more - first) * (len(kind.modules) - KEPT)
    return found
