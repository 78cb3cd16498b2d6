"""ZeRO 3 in bf16: autopar, autopar with gathers in float32, and fully_shard, step by step.

python -m benchmarks.mixed_precision --ranks 2 4 [--fresh] --json FILE

fully_shard in float32 runs beside them: the losses of each differ from its losses by the error
of bf16. Four batches in turn are learned by heart, where small errors grow; `--fresh` draws each
batch anew from one source.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.passes.core.pass_base import PassResult
from autopar.passes.data_parallel.cast_before_gather import CastBeforeGather
from benchmarks.memory import ProfilerCounter
from benchmarks.models import GPT

VOCABULARY, ROWS, TOKENS = 256, 8, 32
COUNTED, WARM = 4, 3  # first steps, and untimed ones after them
OURS, STORED, PEER = "autopar zero3", "autopar zero3, gathers in float32", "fully_shard"
FLOAT32 = "fully_shard, float32"


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this rank sends, as the fastest algorithm of each collective does."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += _sent(str(func), args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: Any) -> float:
    ranks = dist.get_world_size()
    share = (ranks - 1) / ranks
    if name.startswith(("_c10d_functional.wait", "c10d_functional.wait")):
        return 0.0
    if "all_to_all_single" in name:
        tensor, splits = args[0], args[2]
        own = splits[dist.get_rank()] if splits else tensor.shape[0] / ranks
        return float((tensor.shape[0] - own) * tensor.nbytes / max(1, tensor.shape[0]))
    if "all_reduce" in name or "allreduce" in name:
        tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        return sum(2 * share * tensor.nbytes for tensor in tensors)
    if "allgather_." in name:
        return float(sum((ranks - 1) * tensor.nbytes for tensor in args[1]))
    if "_allgather_base_" in name:
        return share * args[0].nbytes  # the output
    if "all_gather_into_tensor" in name:
        return (ranks - 1) * args[0].nbytes  # the input
    if "_reduce_scatter_base_" in name:
        return share * args[1].nbytes
    if "reduce_scatter_tensor" in name:
        return share * args[0].nbytes
    if name.startswith(("c10d.", "_c10d_functional.")) and "barrier" not in name:
        raise NotImplementedError(f"count the bytes of {name}")
    return 0.0


@dataclass
class Contender:
    """A training step and its figures on this rank."""

    name: str
    model: nn.Module
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    sent_bytes: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Trains one step on the global batch."""
        local = self.name in (PEER, FLOAT32)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        rows = [t.chunk(ranks)[rank] if local else t for t in (x, y)]
        loss = self.model(*rows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


def build(name: str) -> nn.Module:
    """The model of a contender; all begin with the same values."""
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, tied=False)
    if name in (PEER, FLOAT32):
        half = torch.bfloat16 if name == PEER else None
        policy = MixedPrecisionPolicy(half, torch.float32)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in [*model.blocks, model]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return model
    with gathers_as_stored() if name == STORED else contextlib.nullcontext():
        buckets = {
            "gather_bytes": 1 << 20,
            "reduce_bytes": 1 << 20,
        }  # less than a block of the peer
        strategy = autopar.Strategy(zero=3, recompute="none", prefetch=1, **buckets)
        inputs = batch(0)
        made = autopar.compile(
            model, example_inputs=inputs, strategy=strategy, precision="bf16", fallback=False
        )
        made(*inputs).backward()  # lowers the call
        made.zero_grad()
    return made


@contextlib.contextmanager
def gathers_as_stored() -> Iterator[None]:
    """Leaves casts after gathers, as before there was a pass for them."""

    def decline(item: CastBeforeGather, graph: Any) -> PassResult:
        return PassResult(graph, "off, to compare")

    with mock.patch.object(CastBeforeGather, "__call__", decline):
        yield


def batch(step: int, fresh: bool = False) -> tuple[Tensor, Tensor]:
    """Global batch of a step: one of four random ones in turn, or one of its own.

    In a batch of its own, three tokens in four follow from the token before, one is random.
    """
    generator = torch.Generator().manual_seed(step if fresh else step % 4)
    x = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=generator)
    if fresh:
        follows = torch.rand(x.shape, generator=generator) < 0.75
        for at in range(1, TOKENS + 1):
            next_token = (5 * x[:, at - 1] + 3) % VOCABULARY
            x[:, at] = torch.where(follows[:, at], next_token, x[:, at])
    return x[:, :-1], x[:, 1:]


def run_rank(rank: int, ranks: int, port: int, steps: int, fresh: bool, out: Path) -> None:
    """Trains all contenders in turn on one rank; rank 0 writes the figures."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = []
    for name in (OURS, STORED, PEER, FLOAT32):
        with ProfilerCounter() as counter:
            contenders.append(contender := Contender(name, build(name)))
            for step in range(COUNTED):
                with counter.step("training"):
                    contender.step(*batch(step, fresh))
        contender.peak_bytes = round(statistics.median(counter.peaks()["training"]))
        with SentBytes() as sent:
            contender.step(*batch(COUNTED, fresh))
        contender.sent_bytes = sent.total
    for step in range(COUNTED + 1, steps):
        order = random.Random(step).sample(contenders, len(contenders))
        for contender in order:
            dist.barrier()
            begin = time.perf_counter()
            contender.step(*batch(step, fresh))
            contender.seconds.append(time.perf_counter() - begin)
    figures = [gathered(contender) for contender in contenders]
    if rank == 0:
        out.write_text(json.dumps(figures))
    dist.destroy_process_group()


def gathered(contender: Contender) -> dict[str, Any]:
    """Figures of a contender over all ranks: slowest steps, most bytes, mean losses."""
    seconds = torch.tensor(contender.seconds[WARM:], dtype=torch.float64)
    most = torch.tensor([contender.peak_bytes, contender.sent_bytes], dtype=torch.float64)
    losses = torch.tensor(contender.losses, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    return {
        "name": contender.name,
        "seconds": seconds.tolist(),
        "peak_bytes": int(most[0]),
        "sent_bytes": int(most[1]),
        "losses": (losses / dist.get_world_size()).tolist(),
    }


def compare(ranks: int, steps: int, fresh: bool, folder: Path) -> dict[str, Any]:
    """Runs the contenders on some processes of this host; ratios are ours over theirs."""
    out = folder / f"mixed-precision-{ranks}.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    before = os.getloadavg()[0]
    multiprocessing.spawn(run_rank, (ranks, port, steps, fresh, out), nprocs=ranks)
    ours, *others = json.loads(out.read_text())
    exact = others[-1]["losses"]
    out.unlink()
    result: dict[str, Any] = {"ranks": ranks, "load": [before, os.getloadavg()[0]]}
    for each in (ours, *others):
        ratios = [a / b for a, b in zip(ours["seconds"], each["seconds"], strict=True)]
        result[each["name"]] = {
            "sent_bytes": each["sent_bytes"],
            "peak_bytes": each["peak_bytes"],
            "median_s": statistics.median(each["seconds"]),
            "our_time": statistics.median(ratios),
            "our_sent_bytes": ours["sent_bytes"] / each["sent_bytes"],
            "our_peak_bytes": ours["peak_bytes"] / each["peak_bytes"],
            "loss_gap": loss_gap(ours["losses"], each["losses"]),
            "gap_to_float32": loss_gap(each["losses"], exact),
            "same_losses": each["losses"] == ours["losses"],
            "last_loss": each["losses"][-1],
        }
    return result


def loss_gap(losses: list[float], others: list[float]) -> dict[str, float]:
    """Relative differences of losses step by step: their median, and the largest."""
    gaps = [abs(a - b) / b for a, b in zip(losses, others, strict=True)]
    return {"median": statistics.median(gaps), "largest": max(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mixed_precision")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--fresh", action="store_true", help="draw each batch anew")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args()
    folder = args.json.parent if args.json else Path.cwd()
    results = [compare(ranks, args.steps, args.fresh, folder) for ranks in args.ranks]
    text = json.dumps(
        {
            "date": str(date.today()),
            "torch": torch.__version__,
            "model": f"GPT, 4 layers of width 256, {ROWS} rows of {TOKENS} tokens",
            "batches": "fresh" if args.fresh else "four in turn",
            "steps": args.steps,
            "results": results,
        },
        indent=1,
    )
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
