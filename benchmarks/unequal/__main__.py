"""Unequal ranks: two ranks on a core each, one of them shared with a busy neighbour.

With `--link` no core is shared. Each rank has a network of its own instead, and one of them sends
at a quarter of the other's rate (root).

Blocks of steps alternate between all divisions of the rows, the even one, the one of
`balance="measured"` and the one of `rebalance()` among them. The best is found by exhaustion.
`--stages` divides the blocks of a pipeline instead.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.network import Network, bits_per_second
from benchmarks.faults.warm import enter_namespace
from benchmarks.launch import free_port
from benchmarks.unequal import rows, stages


def burn(core: int) -> None:
    """The neighbour: takes half of a core, as long as its parent lives."""
    os.sched_setaffinity(0, {core})
    parent = os.getppid()
    while os.getppid() == parent:
        pass


def train(rank: int, meeting: str, spaces: list[str], given: argparse.Namespace, pipe: Any) -> None:
    """One of two ranks, alone on its core or in its network."""
    if spaces:
        enter_namespace(spaces[rank])
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{meeting}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )
    race = stages.race if given.stages else rows.race
    result = race(given.rows, given.rounds)
    if rank == 0:
        pipe.send(result)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--stages", action="store_true", help="of a pipeline, in place of rows")
    parser.add_argument("--link", metavar="RATE", help="of the fast link, such as 1gbit")
    given = parser.parse_args()
    with ExitStack() as stack:
        result = measure(given, stack)
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(given: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Train under all divisions; return the figures."""
    context = multiprocessing.get_context("fork")  # spawn does not find what is in __main__
    ours, theirs = context.Pipe()
    spaces: list[str] = []
    if given.link:
        network = stack.enter_context(Network(2, given.link))
        network.limit(1, f"{bits_per_second(given.link) / 4:.0f}bit")
        spaces = [network.namespace(rank) for rank in range(2)]
        meeting = f"{network.address(0)}:29500"
    else:
        core = sorted(os.sched_getaffinity(0))[1]
        neighbour = context.Process(target=burn, args=(core,), daemon=True)
        neighbour.start()
        stack.callback(neighbour.kill)
        meeting = f"127.0.0.1:{free_port()}"
    arguments = meeting, spaces, given, theirs
    ranks = [context.Process(target=train, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    slow = f"link of rank 1: a quarter of {given.link}" if given.link else "core of rank 1"
    result = ours.recv() | {"slow": slow, "torch": torch.__version__}
    for process in ranks:
        process.join()
    return result


if __name__ == "__main__":
    main()
