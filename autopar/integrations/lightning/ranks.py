"""Process groups, random states and loaders of both of Lightning's strategies."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader

from autopar.integrations.loaders import whole_batches

PRECISIONS = {"16-mixed": "fp16", "bf16-mixed": "bf16"}
"""`precision` of `autopar.compile` by Lightning's, where the forward runs under autocast."""


def backends_for(device: torch.device) -> str:
    """Backends of the process group, for tensors on the device and for objects on the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def synchronize_rng(strategy: Any) -> None:
    """Gives all ranks the random state of rank 0, so that samplers draw alike."""
    torch.set_rng_state(strategy.broadcast(torch.get_rng_state()))


def load_whole_batches(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """A loader of the batches of all ranks, whose workers draw alike on every rank."""
    numbered = loader.batch_sampler
    if isinstance(numbered, _IndexBatchSamplerWrapper):  # as the Trainer makes it to predict
        made, sampler = copy.copy(loader), copy.copy(cast(Any, numbered._batch_sampler))
        sampler.batch_size *= ranks
        vars(made)["batch_sampler"] = _IndexBatchSamplerWrapper(sampler)
    else:
        made = whole_batches(loader, ranks)
    _auto_add_worker_init_fn(made, 0)
    return made
