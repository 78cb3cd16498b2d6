"""Seconds of an optimizer's step with its states in memory and on storage, step by step in turn.

The contenders are torch's AdamW, autopar's `OffloadedOptimizer` and, where it is installed with
its asynchronous I/O, DeepSpeed's ZeRO-3 with states on NVMe. Beside them the same bytes are read
and written without an update: the rate that the storage has.
"""

from __future__ import annotations

import gc
import importlib.util
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.core.common.block_storage import BlockStorage
from benchmarks.offload.models import Model

LR = 1e-4
BLOCK = 16 << 20  # bytes of parameters that are stepped at once
STATES = 2  # tensors of AdamW for each parameter
WARM = 2  # steps that are not counted: they allocate

Step = Callable[[Any], tuple[float, float]]
"""Takes a batch; returns the seconds of the optimizer's step, and the loss."""


class Copies:
    """Reads and writes extents at once, by a thread each, as an offloaded optimizer does."""

    def __init__(self, folder: Path, nbytes: int, size: int) -> None:
        self.storage = BlockStorage(folder)
        self.read, self.written = mmap.mmap(-1, size), mmap.mmap(-1, size)
        self.extents = [self.storage.allocate(size) for _ in range(max(1, nbytes // size))]
        for extent in self.extents:
            self.storage.write(extent, self.written).result()

    @property
    def moved(self) -> int:
        return 2 * sum(extent.size for extent in self.extents)

    def seconds(self) -> float:
        """Seconds to read and to write all of them once."""
        start = time.perf_counter()
        moves = [self.storage.read(extent, self.read) for extent in self.extents]
        moves += [self.storage.write(extent, self.written) for extent in self.extents]
        for move in moves:
            move.result()
        return time.perf_counter() - start


def torch_step(model: Any, optimizer: Any) -> Step:
    def run(batch: Any) -> tuple[float, float]:
        loss = model(*batch)
        loss.backward()
        start = time.perf_counter()
        optimizer.step()
        took = time.perf_counter() - start
        optimizer.zero_grad()
        return took, loss.item()

    return run


def deepspeed_step(model: Any, folder: Path) -> Step:
    """ZeRO-3 on one process, with states on storage and parameters in memory."""
    import deepspeed

    os.environ["LOCAL_RANK"] = "0"  # DeepSpeed asks for it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed("gloo")
    storage = {
        "device": "nvme",
        "nvme_path": str(folder),
        "pin_memory": False,
        "buffer_count": 12,
        "fast_init": False,
        "pipeline_read": True,
        "pipeline_write": True,
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": BLOCK // 4,
            "offload_optimizer": storage,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "thread_count": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def run(batch: Any) -> tuple[float, float]:
        loss = engine(*batch)
        engine.backward(loss)
        start = time.perf_counter()
        engine.step()
        return time.perf_counter() - start, loss.item()

    return run


def compare(folder: Path, rows: int, width: int, layers: int, rounds: int) -> dict[str, Any]:
    """Median seconds of each, losses, and the part of the storage's rate that is reached."""
    batch = torch.randn(rows, width), torch.randn(rows, width)
    plain, offloaded = Model(width, layers), Model(width, layers)
    stored = autopar.OffloadedOptimizer(
        torch.optim.AdamW, offloaded.parameters(), folder=folder, block_bytes=BLOCK, lr=LR
    )
    calls = {
        "memory": torch_step(plain, torch.optim.AdamW(plain.parameters(), lr=LR)),
        "storage": torch_step(offloaded, stored),
    }
    if importlib.util.find_spec("deepspeed"):
        calls["deepspeed"] = deepspeed_step(Model(width, layers), folder)
    gc.collect()
    nbytes = STATES * sum(p.nbytes for p in plain.parameters())
    copies = Copies(folder, nbytes, STATES * BLOCK)
    calls["copies"] = lambda batch: (copies.seconds(), 0.0)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    losses: dict[str, float] = {}
    names = list(calls)
    for turn in range(WARM + rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            took, losses[name] = calls[name](batch)
            if turn >= WARM:
                seconds[name].append(took)
    assert losses["storage"] == losses["memory"], losses
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    moved = {"copies": copies.moved, "storage": 2 * stored.stored_bytes}
    rates = {name: size / medians[name] for name, size in moved.items()}
    return {
        "rows": rows,
        "width": width,
        "layers": layers,
        "seconds": medians,
        "losses": losses,
        "bytes_per_second": rates,
        "reached": rates["storage"] / rates["copies"],
    }
