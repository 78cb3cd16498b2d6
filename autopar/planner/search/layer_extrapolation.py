"""Figures of a model with many equal blocks, extrapolated from a few of each kind."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch import nn

from autopar.capture.repeated_blocks import BlockKind, RepeatedBlocks
from autopar.planner.search.mesh_estimate import Figures

SAMPLED_LAYERS = 2
"""Blocks kept of each kind: the first and its neighbour."""


def kinds_of(model: nn.Module, blocks: Sequence[str]) -> list[BlockKind]:
    """The kinds of equal blocks that have more blocks than the samples need."""
    kinds = RepeatedBlocks(model, blocks).kinds
    return [kind for kind in kinds if len(kind.modules) > SAMPLED_LAYERS + 1]


@contextlib.contextmanager
def with_num_layers(
    model: nn.Module, kinds: Sequence[BlockKind], layers: Sequence[int]
) -> Iterator[None]:
    """Keeps the first blocks of each kind in a model, and restores the others on exit.

    Args:
        model: the model to change.
        kinds: its kinds of equal blocks.
        layers: number of blocks to keep of each kind.
    """
    removed = {
        id(modules[0])
        for kind, count in zip(kinds, layers, strict=True)
        for modules in kind.modules[count:]
    }
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    before = [(each, each._modules) for each in lists]
    try:
        for each in lists:
            left = [child for child in each if id(child) not in removed]
            each._modules = {str(index): child for index, child in enumerate(left)}
        yield
    finally:
        for each, modules in before:
            each._modules = modules


def extrapolate_layers(
    kinds: Sequence[BlockKind], figures_with: Callable[[Sequence[int]], Figures]
) -> Figures:
    """Figures of the whole model, which grow linearly with the blocks of each kind.

    Args:
        kinds: kinds of equal blocks.
        figures_with: figures of the model with a number of blocks of each kind.
    """
    few = [SAMPLED_LAYERS] * len(kinds)
    total = base = figures_with(few)
    for index, kind in enumerate(kinds):
        more = figures_with([*few[:index], SAMPLED_LAYERS + 1, *few[index + 1 :]])
        total = total + (more - base) * (len(kind.modules) - SAMPLED_LAYERS)
    return total
