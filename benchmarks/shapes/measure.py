"""Seconds and memory of new shapes: 30 lengths and 3 numbers of rows of a GPT of 12 layers.

Every shape is trained once, then all of them again, in processes of their own over gloo. The first
call of a shape makes its program; the second one runs it. Times are wall-clock seconds of rank 0,
and CPU seconds of its process beside them, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed as dist

import autopar
from benchmarks.models import GPT

LAYERS, VOCABULARY, WIDTH, HEADS = 12, 64, 64, 4
ROWS = (4, 8, 6)
LENGTHS = tuple(range(8, 128, 4))
STRATEGIES = {
    "ddp": autopar.Strategy(zero=0),
    "zero3": autopar.Strategy(zero=3),
    "tp2": autopar.Strategy(tp=2, zero=0),
    "pp2": autopar.Strategy(pp=2, zero=0, micro_batches=2),
}


@dataclass(frozen=True)
class Result:
    """Times of the first calls of shapes, forward and backward.

    Attributes:
        programs: programs made.
        traced: captures that were traced; the others were derived.
        planned_s: seconds from `compile` to the end of the first step.
        median_s, worst_s: wall-clock seconds of the first call of a shape, the planned one apart.
        median_cpu_s, worst_cpu_s: the same in CPU seconds.
        first_s: wall-clock seconds of the first calls of the second, third and fourth shape.
        again_s: median seconds of a step of a known shape.
        program_mib: resident memory that a program adds, in MiB.
        memory_mib: resident memory at the end, in MiB.
    """

    strategy: str
    ranks: int
    shapes: int
    programs: int
    traced: int
    planned_s: float
    median_s: float
    worst_s: float
    median_cpu_s: float
    worst_cpu_s: float
    first_s: tuple[float, ...]
    again_s: float
    program_mib: float
    memory_mib: float


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def shapes(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(rows, length) for length in lengths for rows in ROWS]


def step(model: Any, rows: int, length: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a forward and backward."""
    ids = torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(length))
    wall, cpu = time.perf_counter(), time.process_time()
    model(ids, ids).backward()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(name: str, ranks: int, lengths: Sequence[int], max_programs: int) -> Result:
    """Trains in every shape twice; all ranks call it at once."""
    torch.manual_seed(0)
    model = GPT(LAYERS, VOCABULARY, tied=False, width=WIDTH, heads=HEADS)
    every = shapes(lengths)
    begin = time.perf_counter()
    compiled: Any = autopar.compile(model, strategy=STRATEGIES[name], max_programs=max_programs)
    step(compiled, *every[0])
    planned = time.perf_counter() - begin
    gc.collect()
    before = resident_mib()
    new = [step(compiled, *shape) for shape in every[1:]]
    gc.collect()
    after = resident_mib()
    again = [step(compiled, *shape)[0] for shape in every[-max_programs:]]
    executor = compiled._execution.executor
    cache = executor.programs if hasattr(executor, "programs") else executor.compiled_calls
    families = compiled._context.families.values()
    walls, cpus = zip(*new, strict=True)
    return Result(
        name,
        ranks,
        len(every),
        cache.added,
        sum(family.traced for family in families),
        *(round(s, 2) for s in (planned, statistics.median(walls), max(walls))),
        *(round(s, 2) for s in (statistics.median(cpus), max(cpus))),
        tuple(round(s, 2) for s in walls[:3]),
        round(statistics.median(again), 4),
        round((after - before) / min(len(new), max_programs), 2),
        round(after),
    )


def work(rank: int, ranks: int, port: int, arguments: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", autopar.AutoparWarning)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    lengths = LENGTHS[: arguments.lengths]
    found = [measure(name, ranks, lengths, arguments.programs) for name in arguments.strategies]
    if rank == 0:
        Path(path).write_text(json.dumps([asdict(result) for result in found], indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--lengths", type=int, default=len(LENGTHS), help="number of lengths")
    parser.add_argument("--programs", type=int, default=64, help="programs that are kept")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    free = dist.TCPStore("127.0.0.1", 0, 1, True)
    port, path = free.port, arguments.json or Path("/tmp/autopar-shapes.json")
    del free
    mp.spawn(work, (arguments.ranks, port, arguments, str(path)), arguments.ranks)  # type: ignore[no-untyped-call]
    for row in json.loads(path.read_text()):
        print(
            f"{row['strategy']:6} {row['programs']:4} programs, {row['traced']:2} traced, "
            f"{row['median_s']:5.2f} s each (worst {row['worst_s']:5.2f}), CPU "
            f"{row['median_cpu_s']:5.2f} s (worst {row['worst_cpu_s']:5.2f}), "
            f"{row['program_mib']:5.1f} MiB each, {row['memory_mib']:6.0f} MiB in all"
        )
