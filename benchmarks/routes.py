"""`python -m benchmarks.routes [--nodes 2 --ranks-per-node 2 --rate 1gbit] [--json FILE]`

The ways to run one collective on gloo, in turn in the same processes: what `lower_collectives` and
`hierarchical_collectives` choose between. Without --nodes ranks are on this machine, else on an
emulated cluster (`benchmarks.cluster`). Medians of the slowest rank's time, in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from autopar.cost_model.algorithms.gloo_chunks import gloo_chunks
from benchmarks.cluster import Network, launch

c10d = torch.ops._c10d_functional
Way = Callable[[Tensor], None]
SIZES = tuple(2**18 * 4**power for power in range(4))
"""256 KiB to 16 MiB."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    top = argparse.ArgumentParser(prog="python -m benchmarks.routes")
    top.add_argument("--nodes", type=int, default=1)
    top.add_argument("--ranks-per-node", type=int, default=2)
    top.add_argument("--rate", default=None, help="of each link, such as 1gbit")
    top.add_argument("--sizes", type=lambda s: tuple(map(int, s.split(","))), default=SIZES)
    top.add_argument("--rounds", type=int, default=10)
    top.add_argument("--json", type=Path)
    top.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = top.parse_args(arguments)
    if options.rank_of is not None:
        _rank(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        _launch(options, [*sys.argv[1:], "--rank-of", str(answer)])
        found = json.loads(answer.read_text())
    setting = {k: getattr(options, k) for k in ("nodes", "ranks_per_node", "rate", "rounds")}
    document = {**setting, "torch": str(torch.__version__), "date": str(date.today()), "ms": found}
    _print(document)
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else []
        options.json.write_text(json.dumps([*known, document], indent=1) + "\n")


def _launch(options: argparse.Namespace, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.routes", *arguments]
    if options.nodes > 1:
        with Network(options.nodes, options.rate) as network:
            launch(network, command, options.ranks_per_node, timeout_s=600)
        return
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks_per_node)]
    subprocess.run([sys.executable, "-m", *run, *command[1:]], check=True)


def _print(document: Mapping[str, Any]) -> None:
    print({k: v for k, v in document.items() if k != "ms"})
    for size, ways in document["ms"].items():
        line = ", ".join(f"{name} {ms:.1f}" for name, ms in ways.items())
        print(f"{int(size) / 2**20:g} MiB: {line}")


# -- a rank ------------------------------------------------------------------------------------


def _rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ways = _ways(rank, world, options.ranks_per_node if options.nodes > 1 else 1)
    found: dict[int, dict[str, float]] = {}
    for size in options.sizes:
        check = torch.arange(size // 4, dtype=torch.float32) % 7 * (rank + 1)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(options.rounds + 1):
            for name, way in ways.items():
                x = check.clone()
                dist.barrier()
                begin = time.perf_counter()
                way(x)
                took = torch.tensor(time.perf_counter() - begin)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if turn:
                    times[name].append(took.item())
                elif "gather" not in name and "scatter" not in name:
                    assert x.equal(check / (rank + 1) * (world * (world + 1) // 2)), name
        found[size] = {name: statistics.median(own) * 1e3 for name, own in times.items()}
    if rank == 0:
        options.rank_of.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def _ways(rank: int, world: int, near: int) -> dict[str, Way]:
    """What is compared, by name."""
    everybody = list(range(world))
    groups = [dist.new_group(everybody).group_name for _ in range(4)]
    found: dict[str, Way] = {
        "all-reduce": lambda x: _wait(c10d.all_reduce_(x, "sum", groups[0])),
        "all-reduce, 2 groups": lambda x: _pieces(x, groups[:2]),
        "all-reduce, 4 groups": lambda x: _pieces(x, groups),
        "all-reduce, exchanged": lambda x: _exchanged(x, rank, world, groups[0]),
    }
    if world == 2:
        found["all-reduce, exchanged whole"] = lambda x: _whole(x, rank, groups[0])
    if 1 < near < world:
        level = _Levels(rank, world, near)
        found["all-reduce, by level"] = lambda x: level.all_reduce([x])
        found["all-reduce, by level in 4"] = lambda x: level.all_reduce(list(x.chunk(4)))
        found["reduce-scatter, by level"] = level.reduce_scatter
        found["all-gather, by level"] = lambda x: level.all_gather(x[: len(x) // world])
    found |= {
        "reduce-scatter": lambda x: _wait(c10d.reduce_scatter_tensor(x, "sum", world, groups[0])),
        "reduce-scatter, exchanged": lambda x: _scatter(x, rank, world, groups[0]),
        "all-gather": lambda x: _wait(
            c10d.all_gather_into_tensor(x[: len(x) // world], world, groups[0])
        ),
        "all-gather, exchanged": lambda x: _gather(x[: len(x) // world], rank, world, groups[0]),
    }
    return found


def _wait(pending: Tensor) -> Tensor:
    return c10d.wait_tensor(pending)


def _pieces(x: Tensor, groups: Sequence[str]) -> None:
    pending = [
        c10d.all_reduce_(piece, "sum", group)
        for piece, group in zip(x.chunk(len(groups)), groups, strict=True)
    ]
    for item in pending:
        _wait(item)


def _whole(x: Tensor, rank: int, group: str) -> None:
    splits = [0, len(x)] if rank == 0 else [len(x), 0]
    x.add_(_wait(c10d.all_to_all_single(x, splits, splits, group)))


def _splits(part: int, rank: int, world: int) -> list[int]:
    return [0 if other == rank else part for other in range(world)]


def _scatter_begin(x: Tensor, rank: int, world: int, group: str) -> list[Tensor]:
    count = gloo_chunks(x.nbytes, world)
    chunks = [chunk.chunk(count) for r, chunk in enumerate(x.chunk(world)) if r != rank]
    found = []
    for parts in zip(*chunks, strict=True):
        sent = parts[0] if world == 2 else torch.cat(parts)
        splits = _splits(len(parts[0]), rank, world)
        found.append(c10d.all_to_all_single(sent, splits, splits, group))
    return found


def _scatter_end(x: Tensor, pending: list[Tensor], rank: int, world: int) -> Tensor:
    tables = [_wait(piece).view(world - 1, -1) for piece in pending]
    totals = [table[0] if world == 2 else table.sum(0) for table in tables]
    return torch.cat(totals).add_(x.chunk(world)[rank])


def _scatter(x: Tensor, rank: int, world: int, group: str) -> Tensor:
    return _scatter_end(x, _scatter_begin(x, rank, world, group), rank, world)


def _gather_begin(own: Tensor, rank: int, world: int, group: str) -> list[Tensor]:
    found = []
    for part in own.chunk(gloo_chunks(own.nbytes * world, world)):
        sent = part if world == 2 else part.repeat(world - 1)
        splits = _splits(len(part), rank, world)
        found.append(c10d.all_to_all_single(sent, splits, splits, group))
    return found


def _gather_end(own: Tensor, pending: list[Tensor], rank: int, world: int) -> Tensor:
    tables = [_wait(piece).chunk(world - 1) for piece in pending]
    pieces = [list(parts) for parts in zip(*tables, strict=True)]
    pieces.insert(rank, [own])
    return torch.cat([part for parts in pieces for part in parts])


def _gather(own: Tensor, rank: int, world: int, group: str) -> Tensor:
    return _gather_end(own, _gather_begin(own, rank, world, group), rank, world)


def _exchanged(x: Tensor, rank: int, world: int, group: str) -> None:
    x.copy_(_gather(_scatter(x, rank, world, group), rank, world, group))


class _Levels:
    """Within nodes, then between them; an all-reduce of pieces, one behind the other."""

    def __init__(self, rank: int, world: int, near: int) -> None:
        self.near, self.place = near, rank % near
        self.far, self.node = world // near, rank // near
        nodes = [list(range(at, at + near)) for at in range(0, world, near)]
        across = [list(range(at, world, near)) for at in range(near)]
        self.within = dist.new_subgroups_by_enumeration(nodes)[0].group_name
        self.between = dist.new_subgroups_by_enumeration(across)[0].group_name

    def reduce_scatter(self, x: Tensor) -> None:
        own = _scatter(x, self.place, self.near, self.within)
        _scatter(own, self.node, self.far, self.between)

    def all_gather(self, own: Tensor) -> None:
        both = _gather(own, self.node, self.far, self.between)
        table = _gather(both, self.place, self.near, self.within)
        table.view(self.near, self.far, -1).permute(1, 0, 2).contiguous()

    def all_reduce(self, pieces: list[Tensor]) -> None:
        place, near, within = self.place, self.near, self.within
        first = [_scatter_begin(x, place, near, within) for x in pieces]
        second = []
        for x, pending in zip(pieces, first, strict=True):
            own = _scatter_end(x, pending, place, near)
            second.append((own, c10d.all_reduce_(own, "sum", self.between)))
        third = []
        for own, pending in second:
            _wait(pending)
            third.append((own, _gather_begin(own, place, near, within)))
        for x, (own, pending) in zip(pieces, third, strict=True):
            x.copy_(_gather_end(own, pending, place, near))


if __name__ == "__main__":
    main()
