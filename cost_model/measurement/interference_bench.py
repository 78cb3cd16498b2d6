"""`measure_slowdown`: slowdown of compute and messages by each other, on the live ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.core.common.groups import has_ended
from autopar.core.common.row_exchange import RECORD_NUMBERS, RowExchange
from autopar.cost_model.cluster.interference import SHARED_GPU, Slowdown
from autopar.cost_model.host import boot_id, shares_cores
from autopar.cost_model.measurement.bench import Bench
from autopar.cost_model.measurement.sample_compute import (
    pieces_until,
    sample_compute,
    seconds_of_piece,
)

_SIZES = (64 * 2**10, 2**20, 8 * 2**20)
_TRIALS = 8
_TRIAL_S = 0.015  # seconds of communication, and of compute, in a trial
_LONGEST_S = 0.2  # slowest collective: larger sizes are left out
_CALLS = 20
_MESSAGES, _MESSAGE = 24, 64 * 2**10  # number of timed messages, and their bytes
_BUSY_S, _PAUSE_S = 0.01, 0.002  # seconds of compute with a message, and before it
_EXCHANGES, _CHUNKS = 20, 10  # timed exchanges, and pieces of compute for a first estimate


def measure_slowdown(bench: Bench, provenance: str) -> Slowdown:
    """The slowdown, from compute alone, all-reduces alone and both at once, at several sizes.

    All ranks of the bench call it. The compute consists of matrix products and memory streams in
    about equal parts, on the calling thread.
    """
    rows: list[tuple[int, float, float]] = []
    shared = _shares_cores(bench)
    for size in _SIZES:
        row = _factors(bench, size, shared=shared)
        if row is None:
            break
        rows.append((size, *row))
    issue_s, wait_s = _means(bench.gather(_call_costs(bench)))
    sizes, compute, communication = zip(*rows, strict=True)
    calls = issue_s, wait_s, provenance
    return Slowdown(sizes, compute, communication, *calls, _late_s(bench), _record_s(bench))


def shared_gpu(bench: Bench) -> Slowdown:
    """The slowdown on a GPU: modelled, with measured seconds of the host for calls."""
    issue_s, wait_s = _means(bench.gather(_call_costs(bench)))
    return replace(SHARED_GPU, issue_s=issue_s, wait_s=wait_s)


def _factors(bench: Bench, nbytes: int, *, shared: bool) -> tuple[float, float] | None:
    """Slowdown of compute and of all-reduces of this size; None if one takes too long.

    Where ranks share cores, the CPU time of gloo's threads tells the slowdown of compute. Its wall
    time there depends on how many ranks compute, and varies by a factor of five between trials.
    """
    buffer = torch.zeros(nbytes // 4)
    chunk = sample_compute()

    def issue(count: int) -> list[Any]:
        made = [dist.all_reduce(buffer, group=bench.group, async_op=True) for _ in range(count)]
        return [work for work in made if work is not None]

    def communicate(count: int) -> float:
        bench.line_up()
        start = time.perf_counter()
        for work in issue(count):
            work.wait()
        return time.perf_counter() - start

    def compute(seconds: float) -> float:
        bench.line_up()
        return seconds_of_piece(chunk, seconds)

    def both(count: int) -> tuple[float, int, float, float]:
        bench.line_up()
        start, threads, thread = time.perf_counter(), time.process_time(), time.thread_time()
        works = issue(count)
        done = pieces_until(chunk, lambda: all(map(has_ended, works)))
        cpu_s, computed_s = time.process_time() - threads, time.thread_time() - thread
        return time.perf_counter() - start, done, cpu_s, computed_s

    first = max(bench.gather(min(communicate(1), communicate(1))))
    if first > _LONGEST_S and nbytes != _SIZES[0]:
        return None
    count = max(1, min(_CALLS, round(_TRIAL_S / first)))
    trials = []
    for _ in range(_TRIALS):
        quiet, busy = communicate(count), compute(_TRIAL_S)
        together, done, cpu_s, computed_s = both(count)
        trials.append((quiet, together, together / (done * busy), cpu_s, computed_s))
    rows = [row for rank in bench.gather(trials) for row in rank]
    quiet, together, _, cpu_s, computed_s = map(sum, zip(*rows, strict=True))
    on_compute = cpu_s / computed_s if shared else statistics.median(row[2] for row in rows)
    return max(1.0, on_compute), max(1.0, together / quiet)


def _shares_cores(bench: Bench) -> bool:
    """Whether ranks of any machine share cores; the same on every rank."""
    ranks = bench.gather(boot_id()).count(boot_id())
    return any(bench.gather(shares_cores(ranks, torch.get_num_threads())))


def _call_costs(bench: Bench) -> tuple[float, float]:
    """Thread seconds of issuing a collective, and of waiting for one that has ended."""
    issue = bench.issuer("all_to_all", bench.group, 1024)
    torch.ops._c10d_functional.wait_tensor(issue())  # connects the ranks
    issued, waited = [], []
    for _ in range(_CALLS):
        bench.line_up()
        start = time.perf_counter()
        pending = issue()
        issued.append(time.perf_counter() - start)
        bench.line_up()  # by then the collective has ended, too
        start = time.perf_counter()
        torch.ops._c10d_functional.wait_tensor(pending)
        waited.append(time.perf_counter() - start)
    return statistics.mean(issued), statistics.mean(waited)  # means, because they add up in a step


def _late_s(bench: Bench) -> float:
    """Extra seconds of a message while all ranks compute except its receiver."""
    if bench.world_size == 1:
        return 0.0
    message, chunk, times = torch.zeros(_MESSAGE // 4), sample_compute(), []

    def compute() -> None:
        end = time.perf_counter() + _PAUSE_S + _BUSY_S
        while time.perf_counter() < end:
            chunk()

    ahead_s, alone_s = _clocks(bench, message)
    for _ in range(_MESSAGES):
        bench.line_up()
        if bench.rank == 1:
            dist.recv(message, group=bench.group, group_src=0)
            times.append(time.perf_counter())
        elif bench.rank == 0:
            time.sleep(_PAUSE_S)  # until the receiver waits
            times.append(time.perf_counter())
            pending = dist.isend(message, group=bench.group, group_dst=1)
            compute()
            if pending is not None:
                pending.wait()
        else:
            compute()
    sent, came, *_ = bench.gather(times)
    spans = [late - early for early, late in zip(sent, came, strict=True)]
    return max(0.0, statistics.mean(spans) - ahead_s - alone_s)


def _record_s(bench: Bench) -> float:
    """Seconds by which an exchange of records lengthens compute of all ranks."""
    if bench.world_size == 1:
        return 0.0
    chunk, differences = sample_compute(), []
    record, rows = [0] * RECORD_NUMBERS, RowExchange(bench.group)

    def timed(chunks: int, *, exchanges: bool) -> float:
        bench.line_up()
        start = time.perf_counter()
        finish = rows.start(record) if exchanges else None
        for _ in range(chunks):
            chunk()
        if finish is not None:
            finish()
        return time.perf_counter() - start

    chunks = max(bench.gather(max(1, round(_CHUNKS * _BUSY_S / timed(_CHUNKS, exchanges=True)))))
    for _ in range(_EXCHANGES):
        without_s = timed(chunks, exchanges=False)
        differences.append(timed(chunks, exchanges=True) - without_s)
    seconds = statistics.mean(map(statistics.median, bench.gather(differences)))
    rows.close()
    return max(0.0, seconds)


def _clocks(bench: Bench, message: torch.Tensor) -> tuple[float, float]:
    """Lead of rank 1's clock over rank 0's, and time of a message alone, in seconds."""
    stamp, found = torch.zeros(1, dtype=torch.float64), []
    for _ in range(_MESSAGES):
        bench.line_up()
        if bench.rank == 0:
            start = time.perf_counter()
            dist.send(message, group=bench.group, group_dst=1)
            dist.recv(stamp, group=bench.group, group_src=1)
            end = time.perf_counter()
            found.append((end - start, stamp.item() - (start + end) / 2))
        elif bench.rank == 1:
            dist.recv(message, group=bench.group, group_src=0)
            stamp.fill_(time.perf_counter())
            dist.send(stamp, group=bench.group, group_dst=0)
    taken, *_ = bench.gather(found)
    middle = sorted(taken)[: max(1, len(taken) // 2)] if taken else [(0.0, 0.0)]
    # The fastest round bounds the clocks' difference best. The median one tells the time of a
    # message.
    round_s, ahead_s = middle[-1][0], middle[0][1]
    return ahead_s, round_s / 2


def _means(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The mean of each column."""
    return tuple(statistics.mean(column) for column in zip(*rows, strict=True))
