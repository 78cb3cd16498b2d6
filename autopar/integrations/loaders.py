"""`whole_batches`: loaders that give every rank the batch of all ranks."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from autopar.errors import StrategyError


def whole_batches(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """A loader of the same rows with `ranks` times the batch size.

    Raises:
        StrategyError: the loader divides the rows over ranks, or makes its batches in its own way.
    """
    if isinstance(loader.sampler, DistributedSampler):
        raise StrategyError(
            "the loader's DistributedSampler divides rows over ranks, and autopar divides batches "
            "itself: give shuffle= or another sampler."
        )
    if loader.batch_size is None:
        raise StrategyError(
            f"the loader's batches are made by its {type(loader.batch_sampler).__name__}, so they "
            "cannot be those of all ranks: give a sampler and batch_size, let it make whole "
            "batches and give split_batches=True, or let each rank take batches of its own by "
            "compile_options={'batch': 'local'}."
        )
    made, rows = copy.copy(loader), loader.batch_size * ranks
    seed = loader.worker_init_fn
    if isinstance(seed, partial) and "rank" in seed.keywords:
        made.worker_init_fn = partial(seed, rank=0)  # workers of all ranks draw the same
    sampler = BatchSampler(loader.sampler, rows, loader.drop_last)
    vars(made).update(batch_size=rows, batch_sampler=sampler)
    return made
