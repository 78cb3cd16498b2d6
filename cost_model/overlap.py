"""How much of a collective hides behind compute, found by running both at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from autopar.cost_model.bench import Bench

_BYTES = 4 * 2**20
_TRIALS = 5
_SIDE = 192  # of the matrices that are multiplied meanwhile


def measure_overlap(bench: Bench) -> float:
    """The fraction, 0 to 1, of the shorter of compute and communication that runs in parallel.

    With compute alone taking c seconds, an all-reduce alone m, and both together b, it is
    (c + m - b) / min(c, m). Matrices are multiplied for about as long as the all-reduce takes.
    """
    issue = bench.issuer("all_reduce", bench.world_size, _BYTES)
    matrix = torch.rand(_SIDE, _SIDE)

    def communicate() -> None:
        torch.ops._c10d_functional.wait_tensor(issue())

    def once() -> None:
        torch.mm(matrix, matrix)

    communicate()
    alone = statistics.median(_time(bench, communicate) for _ in range(3))
    product = statistics.median(_time(bench, once) for _ in range(3))
    count = bench.agree(lambda: max(1, round(alone / product)))

    def compute() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    def both() -> None:
        pending = issue()
        compute()
        torch.ops._c10d_functional.wait_tensor(pending)

    trials = [[_time(bench, run) for run in (compute, communicate, both)] for _ in range(_TRIALS)]
    c, m, b = (statistics.median(column) for column in zip(*trials, strict=True))
    hidden = bench.gather((c + m - b) / min(c, m))
    return min(1.0, max(0.0, statistics.mean(hidden)))


def _time(bench: Bench, run: Callable[[], None]) -> float:
    bench.line_up()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
