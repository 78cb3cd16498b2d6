"""`race`: plans run on the ranks that there are, in turn, step by step, on copies of a module."""

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
from autopar.cost_model.optimizer import Optimizer, make_optimizer
from autopar.plan import Plan
from autopar.runtime.agreement import from_everywhere

if TYPE_CHECKING:
    from autopar.runtime.module import DistributedModule

WARM, LEAST, MOST = 2, 5, 21
"""Rounds that are not timed, and between how many that are."""

BUDGET_S = 12.0
"""Seconds for timed rounds, if that is enough for the least number of them."""

SHARE = 0.5
"""Of the memory that is free, what plans on trial may take."""


@dataclass(frozen=True)
class Timed:
    """What came of a race.

    Attributes:
        seconds: of a step of each plan, on the rank that took longest.
        rounds: that were timed.
    """

    seconds: tuple[float, ...]
    rounds: int


def room(device: torch.device, sharing: int) -> int | None:
    """Bytes that the plans on trial may take on a rank; None if that is not known.

    Args:
        device: where they run.
        sharing: ranks that share this host's memory.
    """
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0])
    free = free_memory_bytes()
    return int(SHARE * free / sharing) if free else None


def race(
    copy_under: Callable[[Plan], DistributedModule],
    plans: Sequence[Plan],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: Optimizer,
) -> Timed:
    """Trains each plan for a few steps of a call. Every rank calls it at once.

    A step counts in proportion to its round, since machines drift from round to round.

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
        taken = max(from_everywhere(time.perf_counter() - began))
        rounds = max(LEAST, min(MOST, int(BUDGET_S / taken)))
        mine = [_round(runners, number) for number in range(rounds)]
    for runner in runners:
        runner.release()
    gc.collect()
    slowest = [
        [max(each) for each in zip(*together, strict=True)]
        for together in zip(*from_everywhere(mine), strict=True)
    ]
    means = [statistics.fmean(row) for row in slowest]
    shares = [[s / mean for s in row] for row, mean in zip(slowest, means, strict=True)]
    middling = statistics.median(means)
    seconds = tuple(middling * statistics.median(own) for own in zip(*shares, strict=True))
    return Timed(seconds, rounds)


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, of which nobody else sees the gradient."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _round(runners: Sequence[_Runner], number: int) -> list[float]:
    """Seconds of a step of each, in an order of its own that is the same on every rank."""
    order, seconds = list(range(len(runners))), [0.0] * len(runners)
    random.Random(number).shuffle(order)
    for index in order:
        seconds[index] = runners[index].timed()
    return seconds


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
