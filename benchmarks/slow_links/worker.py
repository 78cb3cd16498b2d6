"""One rank of one contender: `python -m benchmarks.slow_links.worker NAME OPTIONS FILE`."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import autopar
from benchmarks.cluster.network import sent_bytes
from benchmarks.slow_links.contenders import DDP, LOCAL
from benchmarks.slow_links.learning_rate import learning_rate
from examples.train_gpt import GPT, batch, read_stdlib, validation_loss


def through_gloo(state, bucket):  # DDP rejects annotations that are text
    """Runs torch's bf16 hook, which DDP refuses by its name without NCCL."""
    return bf16_compress_hook(state, bucket)


def make(name: str, every: int, seq: int) -> nn.Module:
    torch.manual_seed(0)
    plain = GPT(seq)
    if name in DDP:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(plain)
        if DDP[name]:
            model.register_comm_hook(None, through_gloo)
        return model
    strategy = autopar.Strategy(
        zero=0, recompute="none", sync_every=every, outer=LOCAL[name], gather_bytes=1 << 20,
        reduce_bytes=1 << 20, prefetch=1,
    )  # fmt: skip
    return autopar.compile(plain, strategy=strategy, batch="local", fallback=False)


def train(
    name: str, steps: int, every: int, rows: int, seq: int, lr: float, warm_up: int | None
) -> dict[str, Any]:
    """Train, and return figures of rank 0."""
    text, held_out = read_stdlib()
    model = make(name, every, seq)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = AdamW(model.parameters(), lr=lr)

    def own_rows(seed: int) -> tuple[Tensor, Tensor]:
        x, y = batch(text, rows, seq, seed)
        own = slice(rank * rows // ranks, (rank + 1) * rows // ranks)
        return x[own], y[own]

    model(*own_rows(0)).backward()  # captures and connects
    optimizer.zero_grad()
    dist.barrier()
    begin, before = time.perf_counter(), sent_bytes()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, lr, warm_up)
        model(*own_rows(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    seconds, sent = time.perf_counter() - begin, sent_bytes() - before
    loss = float("nan")
    if rank == 0:
        bare = model.module if name in DDP else model.user_module
        loss = validation_loss(bare.eval(), held_out, 32, seq)
    dist.barrier()
    return {
        "contender": name,
        "steps_per_s": steps / seconds,
        "sent_bytes_per_step": sent / steps,
        "validation_loss": loss,
    }


def main() -> None:
    name, options, path = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    figures = train(name, **json.loads(options))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
