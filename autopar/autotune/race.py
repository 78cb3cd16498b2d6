"""`benchmark_plans`: runs plans in turn, step by step, on copies of a module."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

WARM, LEAST, MOST = 2, 5, 21
"""Rounds that are not timed, and between how many that are."""

NEAR = 1.15
"""Times as slow as the fastest a plan may be after the least number of rounds, and still go on."""

BUDGET_S = 12.0
"""Seconds for the rounds behind these."""

SHORT_S = 0.5
"""Steps up to which caches count: each timed one follows one of the same plan, as in training."""

SHARE = 0.5
"""Of the memory that is free, what plans on trial may take."""


@dataclass(frozen=True)
class Timed:
    """What came of a race.

    Attributes:
        seconds: of a step of each plan, on the rank that took longest.
        rounds: that were timed, of the fastest.
    """

    seconds: tuple[float, ...]
    rounds: int


def copies_that_fit(device: torch.device, sharing: int) -> int | None:
    """Bytes that the plans on trial may take on a rank; None if that is not known.

    Args:
        device: where they run.
        sharing: ranks that share this host's memory.
    """
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    free = free_memory_bytes()
    return int(SHARE * free / sharing) if free else None


def benchmark_plans(
    copy_under: Callable[[Plan], DistributedModule],
    plans: Sequence[Plan],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: Optimizer,
) -> Timed:
    """Trains each plan for a few steps of a call, and those near the fastest for some more.

    Every rank calls it at once.

    Args:
        copy_under: a module of its own that follows a plan.
        plans: that take turns.
        args: of the call.
        kwargs: of the call.
        optimizer: class or factory.
    """
    args, kwargs = pytree.tree_map_only(torch.Tensor, _apart, (tuple(args), kwargs))
    runners = [_Runner(copy_under(plan), args, kwargs, optimizer) for plan in plans]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        began = time.perf_counter()
        for _ in range(WARM):
            began = time.perf_counter()
            for runner in runners:
                runner.step()
        step_s = max(gather_objects(time.perf_counter() - began)) / len(runners)
        ahead = step_s < SHORT_S
        table = _rounds(runners, range(LEAST), ahead=ahead)
        first = _middling(table)
        near = [i for i, seconds in enumerate(first) if seconds <= NEAR * min(first)]
        spare = int(BUDGET_S / (step_s * (1 + ahead) * len(near)))
        rounds = LEAST + min(MOST - LEAST, spare) * (len(near) > 1)
        finals = [runners[i] for i in near]
        more = _rounds(finals, range(LEAST, rounds), ahead=ahead)
    for runner in runners:
        runner.release()
    gc.collect()
    last = _middling([*([row[i] for i in near] for row in table), *more])
    drift = statistics.fmean(last) / statistics.fmean(first[i] for i in near)
    of = dict(zip(near, last, strict=True))
    return Timed(tuple(of.get(i, drift * own) for i, own in enumerate(first)), rounds)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, of which nobody else sees the gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _rounds(
    runners: Sequence[_Runner], numbers: Sequence[int], *, ahead: bool
) -> list[list[float]]:
    """Seconds of a step of each in each round, on the rank that took longest."""
    mine = [_round(runners, number, ahead=ahead) for number in numbers]
    return [
        [max(each) for each in zip(*together, strict=True)]
        for together in zip(*gather_objects(mine), strict=True)
    ]


def _round(runners: Sequence[_Runner], number: int, *, ahead: bool) -> list[float]:
    """Seconds of a step of each, in an order of its own that is the same on every rank.

    Args:
        runners: that take turns.
        number: of the round.
        ahead: whether each trains a step that is not timed before.
    """
    order, seconds = list(range(len(runners))), [0.0] * len(runners)
    random.Random(number).shuffle(order)
    for index in order:
        if ahead:
            runners[index].step()
        seconds[index] = runners[index].timed()
    return seconds


def _middling(table: Sequence[Sequence[float]]) -> list[float]:
    """A step of each; one counts in proportion to its round, since machines drift meanwhile."""
    means = [statistics.fmean(row) for row in table]
    shares = [[own / mean for own in row] for row, mean in zip(table, means, strict=True)]
    middling = statistics.median(means)
    return [middling * statistics.median(own) for own in zip(*shares, strict=True)]


class _Runner:
    """A copy that trains."""

    def __init__(
        self,
        module: DistributedModule,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        optimizer: Optimizer,
    ) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        own = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(optimizer, own) if own else None

    def step(self) -> None:
        """Forward, backward and the optimizer's step."""
        outputs = pytree.tree_leaves(self.module(*self.args, **self.kwargs))
        trained = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
        trained = [x for x in trained if not x.dim()] or trained
        torch.autograd.backward(trained, [torch.ones_like(x) for x in trained])
        if self.optimizer is not None:
            self.optimizer.step(lambda: 0.0)
            self.optimizer.zero_grad()

    def timed(self) -> float:
        """Seconds of a step, from a common start."""
        device = self.module._device
        dist.all_reduce(torch.zeros(1, device=device))
        _finish(device)
        start = time.perf_counter()
        self.step()
        _finish(device)
        return time.perf_counter() - start

    def release(self) -> None:
        """Lets go of parameters and states, which what holds each other would keep."""
        self.optimizer = None
        for parameter in self.module.parameters():
            parameter.grad = None
        del self.module


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
