"""`derivation`: a note on what a plan by arithmetic follows from, and on what it leaves out."""

from __future__ import annotations

from collections.abc import Sequence

MOST_STEP, MOST_MEMORY = 0.05, 0.14
"""Largest differences of step and memory from the same plans lowered whole, as fractions.

Of the plans in benchmarks/results/planning/whole-2026-12-02.json (`benchmarks.planning.whole`).
"""

LEAVES_OUT = (
    "messages that queue up or share a bucket over more blocks, other moments of the peak, and "
    "blocks of the allocator"
)


def of_blocks(kinds: Sequence[Sequence[str]], samples: Sequence[Sequence[int]]) -> str:
    """The note on a plan whose blocks of each kind follow from few of them.

    >>> print(of_blocks([["a", "b", "c", "d"]], [[2], [3]]).split(".")[0])
    predicted by arithmetic: 4 blocks from 2 and 3
    """
    counts = " and ".join(str(len(kind)) for kind in kinds)
    few = " and ".join(map(str, sorted({count for layers in samples for count in layers})))
    each = " of each kind" if len(kinds) > 1 else ""
    return _note(f"{counts} blocks from {few}{each}")


def of_stages(stages: int, blocks: int, few: Sequence[int]) -> str:
    """The note on a pipeline that follows from its first, a middle and its last stage.

    Args:
        stages: number of stages of the plan.
        blocks: number of its repeated blocks.
        few: numbers of blocks of a stage that was lowered.
    """
    sizes = " and ".join(map(str, few))
    return _note(f"{stages} stages of {blocks} blocks from 3 stages of {sizes} each")


def _note(source: str) -> str:
    return (
        f"predicted by arithmetic: {source}. Lowered whole, {LEAVES_OUT} count too: that changed "
        f"steps by up to {MOST_STEP:.0%} and memory by up to {MOST_MEMORY:.0%} in a benchmark "
        "(docs/planning.md). To have it lowered whole, fix its axes in the strategy and give a "
        "longer time limit"
    )
