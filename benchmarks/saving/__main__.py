"""`python -m benchmarks.saving`: stall of a checkpoint, beside torch.distributed.checkpoint's own.

Two ranks train a GPT under ZeRO 3. Ways to save take turns, none at all among them: a save, then
some steps beside the writing, then a wait until it is on disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import autopar
from benchmarks.launch import free_port
from benchmarks.models import GPT
from benchmarks.report import about, empty_table, save, wide_console

VOCABULARY, ROWS, TOKENS, LAYERS = 256, 4, 32, 4
WAYS = ("none", "dcp.save", "dcp.async_save", "Checkpointer.save")
BESIDE = 4  # steps beside the writing

Finish = Callable[[], Any]
"""Waits until a checkpoint is on disk."""


def ways(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    """Return functions that begin a checkpoint, by name; each returns its `Finish`."""
    checkpointer = autopar.Checkpointer(folder / "own", model, optimizer, keep=1)
    group, count = dist.new_group(backend="gloo"), iter(range(1, 10_000))

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def synchronous() -> Finish:
        dcp.save(state(), checkpoint_id=folder / f"sync-{next(count)}")
        return lambda: None

    def asynchronous() -> Finish:
        path = folder / f"async-{next(count)}"
        return dcp.async_save(state(), checkpoint_id=path, process_group=group).result

    def own() -> Finish:
        checkpointer.save(next(count))
        return checkpointer.wait

    return dict(zip(WAYS, (lambda: lambda: None, synchronous, asynchronous, own), strict=True))


def train(rank: int, port: int, options: argparse.Namespace, folder: Path, pipe: Any) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    net = GPT(LAYERS, VOCABULARY, tied=False, width=options.width, heads=4)
    sizes = {"gather_bytes": 1 << 22, "reduce_bytes": 1 << 22, "prefetch": 1}
    strategy = autopar.Strategy(zero=3, recompute="none", **sizes)
    model = autopar.compile(net, strategy=strategy, example_inputs=(ids, ids), fallback=False)
    optimizer = torch.optim.AdamW(model.parameters())

    def steps(count: int) -> None:
        for _ in range(count):
            model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(3)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    begins = ways(model, optimizer, folder)
    for number in range(options.rounds + 1):
        for name in random.Random(number).sample(WAYS, len(WAYS)):  # some slow the next one down
            dist.barrier()
            begin = time.perf_counter()
            finish = begins[name]()
            stall = time.perf_counter() - begin
            steps(BESIDE)
            dist.barrier()
            if number:  # the first round opens files and groups
                times[name].append((stall, time.perf_counter() - begin))
            finish()
            dist.barrier()
            if rank == 0:
                for old in [*folder.glob("sync-*"), *folder.glob("async-*")]:
                    shutil.rmtree(old)
    if rank == 0:
        size = sum(p.numel() for p in net.parameters()) * 12
        pipe.send((size, times))
    dist.destroy_process_group()


def figures(times: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Return medians; the ratios are medians over the rounds."""
    found = []
    rounds = [dict(zip(times, each, strict=True)) for each in zip(*times.values(), strict=True)]
    for name in WAYS[1:]:
        stalls = [each[name][0] for each in rounds]
        ratios = [each[name][0] / each["dcp.save"][0] for each in rounds]
        extras = [each[name][1] - each["none"][1] for each in rounds]
        stall_s, over_sync, extra_s = map(statistics.median, (stalls, ratios, extras))
        found.append({"way": name, "stall_s": stall_s, "over_sync": over_sync, "extra_s": extra_s})
    return found


def table(found: list[dict[str, Any]], size: int) -> Any:
    headings = ("stands still, ms", "/ dcp.save", f"longer, with {BESIDE} steps beside it, ms")
    drawn = empty_table(f"A checkpoint of {size / 1e6:.0f} MB", "save", headings)
    for each in found:
        cells = f"{1e3 * each['stall_s']:.1f}", f"{each['over_sync']:.3f}"
        drawn.add_row(each["way"], *cells, f"{1e3 * each['extra_s']:.0f}")
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--folder", type=Path, help="where to write; by default a temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("fork")  # spawn does not find what is in __main__
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        arguments = free_port(), options, Path(name), theirs
        ranks = [context.Process(target=partial(train, rank), args=arguments) for rank in range(2)]
        for process in ranks:
            process.start()
        size, times = ours.recv()
        for process in ranks:
            process.join()
    found = figures(times)
    wide_console().print(table(found, size))
    if options.json is not None:
        setting = {"rounds": options.rounds, "width": options.width, "bytes": size}
        save(
            options.json,
            {**about(), **setting, "ways": found, "times": times},
        )


if __name__ == "__main__":
    main()
