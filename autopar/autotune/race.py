"""`benchmark_plans`: times steps of several plans in rounds, on copies of a module."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from autopar._torch import pytree
from autopar.cost_model.host import free_memory_bytes
from autopar.cost_model.memory.optimizer_memory import Optimizer, make_optimizer
from autopar.report.plan import Plan
from autopar.runtime.agreement.consensus import gather_objects

if TYPE_CHECKING:
    from autopar.runtime.module import DistributedModule

WARMUP_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 2, 5, 21
"""Number of untimed rounds, and limits on the number of timed rounds."""

FINALIST_MARGIN = 1.15
"""Maximum ratio of a finalist's median step time to the fastest, after `MIN_ROUNDS`."""

BUDGET_S = 12.0
"""Time for the rounds of the finalists, in seconds."""

SHORT_STEP_S = 0.5
"""Step time in seconds below which an untimed step precedes each timed one, to warm caches."""

MEMORY_FRACTION = 0.5
"""Fraction of the free memory available to benchmarked plans."""


def memory_budget(device: torch.device, sharing: int) -> int | None:
    """Bytes for benchmarked plans on one of `sharing` ranks of a host; None if unknown."""
    if device.type == "cuda":
        return int(MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0])
    free = free_memory_bytes()
    return int(MEMORY_FRACTION * free / sharing) if free else None


def benchmark_plans(
    copy_under: Callable[[Plan], DistributedModule],
    plans: Sequence[Plan],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: Optimizer,
) -> tuple[tuple[float, ...], int]:
    """Trains each plan for a few steps of one call, and plans near the fastest for more steps.

    Collective: all ranks must call it. Returns the seconds of each plan's step on the slowest rank,
    and the number of timed rounds of the finalists.
    """
    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad),
        (tuple(args), kwargs),
    )
    runners = [_Runner(copy_under(plan), args, kwargs, optimizer) for plan in plans]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        start = time.perf_counter()
        for _ in range(WARMUP_ROUNDS):
            start = time.perf_counter()
            for runner in runners:
                runner.step()
        step_s = max(gather_objects(time.perf_counter() - start)) / len(runners)
        warm = step_s < SHORT_STEP_S
        table = _time_rounds(runners, range(MIN_ROUNDS), warm=warm)
        first = _medians(table)
        finalists = [i for i, s in enumerate(first) if s <= FINALIST_MARGIN * min(first)]
        affordable = int(BUDGET_S / (step_s * (1 + warm) * len(finalists)))
        more = min(MAX_ROUNDS - MIN_ROUNDS, affordable) if len(finalists) > 1 else 0
        rounds = range(MIN_ROUNDS, MIN_ROUNDS + more)
        final_table = _time_rounds([runners[i] for i in finalists], rounds, warm=warm)
    for runner in runners:
        runner.release()
    gc.collect()
    last = _medians([*([row[i] for i in finalists] for row in table), *final_table])
    drift = statistics.fmean(last) / statistics.fmean(first[i] for i in finalists)
    final = dict(zip(finalists, last, strict=True))
    seconds = (final.get(i, drift * median) for i, median in enumerate(first))
    return tuple(seconds), MIN_ROUNDS + more


def _time_rounds(
    runners: Sequence[_Runner], rounds: Sequence[int], *, warm: bool
) -> list[list[float]]:
    """Step times by round and runner, on the slowest rank; a `warm` step is not timed.

    The order of the runners is shuffled by the round, equally on all ranks.
    """
    local = []
    for index in rounds:
        order, seconds = list(range(len(runners))), [0.0] * len(runners)
        random.Random(index).shuffle(order)
        for i in order:
            if warm:
                runners[i].step()
            seconds[i] = runners[i].timed_step()
        local.append(seconds)
    return [
        [max(ranks) for ranks in zip(*by_rank, strict=True)]
        for by_rank in zip(*gather_objects(local), strict=True)
    ]


def _medians(table: Sequence[Sequence[float]]) -> list[float]:
    """Median step times, normalised by the mean of each round to cancel machine drift."""
    means = [statistics.fmean(row) for row in table]
    relative = [[each / mean for each in row] for row, mean in zip(table, means, strict=True)]
    typical = statistics.median(means)
    return [typical * statistics.median(column) for column in zip(*relative, strict=True)]


class _Runner:
    """A copy of the module that trains on one batch."""

    def __init__(
        self,
        module: DistributedModule,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        optimizer: Optimizer,
    ) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(optimizer, trained) if trained else None

    def step(self) -> None:
        outputs = pytree.tree_leaves(self.module(*self.args, **self.kwargs))
        trained = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
        trained = [x for x in trained if not x.dim()] or trained
        torch.autograd.backward(trained, [torch.ones_like(x) for x in trained])
        if self.optimizer is not None:
            self.optimizer.step(lambda: 0.0)
            self.optimizer.zero_grad()

    def timed_step(self) -> float:
        """Duration of a step in seconds, from a common start of all ranks."""
        device = self.module._device
        dist.all_reduce(torch.zeros(1, device=device))
        _synchronize(device)
        start = time.perf_counter()
        self.step()
        _synchronize(device)
        return time.perf_counter() - start

    def release(self) -> None:
        """Frees parameters and optimizer state, which reference cycles would keep alive."""
        self.optimizer = None
        for parameter in self.module.parameters():
            parameter.grad = None
        del self.module


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
