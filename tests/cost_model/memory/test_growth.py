"""Peaks of many blocks from few, against steps made by hand."""

import numpy as np
import pytest

from autopar.cost_model.memory.growth import MoreBlocks, grown_parts, parts_of_step
from autopar.cost_model.memory.liveness import CATEGORIES

ROW = {name: row for row, name in enumerate(CATEGORIES)}
STATE, SAVED, GRADIENT, GATHERED, HEAD = 3, 5, 2, 40, 60


def step(blocks, held=2, gradient=GRADIENT, saved=SAVED, stored=False):
    """Each block computes, then the head, then each block's backward; `held` blocks are gathered.

    With `stored`, gathered parameters stay from the forward until the backward.
    """
    table = np.zeros((len(CATEGORIES), 2 * blocks + 2), np.int64)
    table[ROW["parameters"]] = STATE * blocks
    for block in range(blocks):
        forth, back = block, 2 * blocks - block
        table[ROW["saved"], forth:back] += saved
        table[ROW["gradients"], back:] += gradient
        if stored:
            table[ROW["gathered"], forth : back + 1] += GATHERED
            continue
        for at, others in ((forth, blocks - block), (back, block + 1)):
            table[ROW["gathered"], at] += GATHERED * min(held, others)
    table[ROW["transient"], blocks] = HEAD
    return table


def parts(table):
    points = table.shape[1] - 1
    blocks = points // 2
    at = np.arange(points)
    progress = np.where(at <= blocks, at / (blocks + 1), (at - blocks - 1) / blocks)
    return parts_of_step(table, at <= blocks, progress)


def grown(blocks, zero_stage=3, bucket_bytes=0, **options):
    few, more = (parts(step(count, **options)) for count in (2, 3))
    found = grown_parts(few, [MoreBlocks(more, blocks - 2)], zero_stage, bucket_bytes)
    return max(int(part.sum()) for part in found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"held": 3},  # two blocks do not hold as much at once as three
        {"gradient": 20},  # most at the end of the backward
        {"gradient": 20, "saved": 0},
        {"held": 6, "bucket_bytes": 6 * GATHERED},
        {"stored": True, "zero_stage": 2},
    ],
    ids=str,
)
def test_the_peak_is_that_of_the_whole_step(options):
    made = {
        name: value for name, value in options.items() if name not in ("zero_stage", "bucket_bytes")
    }
    whole = step(12, **made)
    found = grown(12, **options)
    assert found == whole.sum(axis=0).max()


def test_blocks_that_share_a_bucket_hold_no_more_than_there_are():
    most = step(4, held=9).sum(axis=0).max()
    assert grown(4, held=9, bucket_bytes=9 * GATHERED) == most


def test_kinds_add_up_but_share_no_moment():
    few, more = parts(step(2, held=3)), parts(step(3, held=3))
    both = grown_parts(few, [MoreBlocks(more, 5), MoreBlocks(more, 4)], 3, 0)
    assert max(part.sum() for part in both) == step(11, held=3).sum(axis=0).max()
