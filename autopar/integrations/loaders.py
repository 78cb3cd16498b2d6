"""`whole_batches`: loaders that give every rank the batch of all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from autopar.errors import StrategyError

KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
"""Arguments of a loader that do not depend on the number of rows."""


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
            "cannot be those of all ranks: give a sampler and batch_size, or let it make whole "
            "batches and give split_batches=True."
        )
    options = {name: getattr(loader, name) for name in KEPT}
    seed = options["worker_init_fn"]
    if isinstance(seed, partial) and "rank" in seed.keywords:
        options["worker_init_fn"] = partial(seed, rank=0)  # workers of all ranks draw the same
    rows, drops = loader.batch_size * ranks, loader.drop_last
    if isinstance(loader.dataset, IterableDataset):
        return DataLoader(loader.dataset, rows, drop_last=drops, **options)
    return DataLoader(
        loader.dataset, batch_sampler=BatchSampler(loader.sampler, rows, drops), **options
    )
