"""`benchmark_plans`: times steps of several plans in rounds, on copies of a module."""

from __future__ import annotations

import gc
import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from autopar._torch import pytree
from autopar.core.plan.plan import Plan
from autopar.cost_model.host import free_memory_bytes
from autopar.cost_model.memory.optimizer_memory import Optimizer, make_optimizer
from autopar.errors import AutoparError, CommunicationError, DisagreementError
from autopar.runtime.agreement.consensus import gather_objects
from autopar.runtime.group_cache import abort_temporary_groups, temporary_groups
from autopar.session.round_times import RoundTimes

if TYPE_CHECKING:
    from autopar.runtime.module import DistributedModule

T = TypeVar("T")

WARMUP_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 2, 5, 60
"""Number of untimed rounds, and limits on the number of timed rounds."""

BUDGET_S = 20.0
"""Seconds of steps after which no round begins, beyond the fewest."""

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


@dataclass(frozen=True)
class Trial:
    """Plans that were benchmarked.

    Attributes:
        plans: plans that ran on all ranks.
        seconds: step time in seconds of each on the slowest rank; empty if fewer than two ran.
        rounds: timed rounds of those that were not found slower.
        notes: plans that were dropped, with the reasons.
    """

    plans: tuple[Plan, ...]
    seconds: tuple[float, ...] = ()
    rounds: int = 0
    notes: tuple[str, ...] = ()


def benchmark_plans(
    copy_under: Callable[[Plan], DistributedModule],
    plans: Sequence[Plan],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optimizer: Optimizer,
) -> Trial:
    """Trains each plan for a few steps of one call, and plans not found slower for more steps.

    A plan that runs out of memory on any rank is dropped on all, and the others start again.
    Collective: all ranks must call it.
    """
    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad),
        (tuple(args), kwargs),
    )
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    left, notes = list(plans), list[str]()
    while len(left) > 1:
        runners = _Runners(lambda plan: _Runner(copy_under(plan), args, kwargs, optimizer))
        with temporary_groups(), torch.random.fork_rng(devices), torch.enable_grad():
            try:
                for plan in left:
                    runners.add(plan)
                times = _run(runners)
                seconds = tuple(times.medians().values())
                rounds = len(times.rounds)
                return Trial(tuple(left), seconds, rounds, tuple(notes))
            except _DroppedError as dropped:
                index, why = dropped.args
                notes.append(f"{left.pop(index).name} is no candidate: {why}")
            finally:
                runners.release()
    return Trial(tuple(left or plans[:1]), notes=tuple(notes))


def _run(runners: _Runners) -> RoundTimes:
    """Times rounds until one plan is left, or the time is over; equal on all ranks."""
    every = range(len(runners.made))
    start = time.perf_counter()
    for _ in range(WARMUP_ROUNDS):
        start = time.perf_counter()
        for index in every:
            runners.step(index)
    step_s = max(gather_objects(time.perf_counter() - start)) / len(every)
    warm, spent_s = step_s < SHORT_STEP_S, 0.0
    times = RoundTimes(list(every))
    for number in range(MAX_ROUNDS):
        seconds = _time_round(runners, times.left, number, warm=warm)
        times.add(seconds)
        spent_s += (1 + warm) * sum(seconds)
        if number + 1 >= MIN_ROUNDS:
            times.rule_out()
            if len(times.left) == 1 or spent_s > BUDGET_S:
                break
    return times


def _time_round(
    runners: _Runners, chosen: Sequence[int], number: int, *, warm: bool
) -> list[float]:
    """Step times of chosen runners, on the slowest rank; a `warm` step is not timed.

    The order of the runners is shuffled by the number of the round, equally on all ranks.
    """
    order, seconds = list(range(len(chosen))), [0.0] * len(chosen)
    random.Random(number).shuffle(order)
    for i in order:
        if warm:
            runners.step(chosen[i])
        seconds[i] = runners.timed_step(chosen[i])
    return [max(ranks) for ranks in zip(*gather_objects(seconds), strict=True)]


class _DroppedError(Exception):
    """A plan's index, and the reason to drop it; raised on all ranks."""


@dataclass
class _Runners:
    """Runners of plans on this rank, whose steps all ranks vote on."""

    make: Callable[[Plan], _Runner]
    made: list[_Runner] = field(default_factory=list)

    def add(self, plan: Plan) -> None:
        self.made.append(self._on_all_ranks(len(self.made), lambda: self.make(plan)))

    def step(self, index: int) -> None:
        self._on_all_ranks(index, self.made[index].step)

    def timed_step(self, index: int) -> float:
        """Duration of a step in seconds; the vote on the step before was the common start."""
        device = self.made[index].module._context.device
        _synchronize(device)
        start = time.perf_counter()
        on_cpu_s = self._on_all_ranks(index, lambda: self._seconds(index, start))
        if device.type == "cpu":
            return on_cpu_s
        _synchronize(device)  # after the vote: kernels might wait for a rank that has failed
        return time.perf_counter() - start

    def _seconds(self, index: int, start: float) -> float:
        self.made[index].step()
        return time.perf_counter() - start

    def release(self) -> None:
        """Frees parameters and optimizer states, which reference cycles would keep alive."""
        for runner in self.made:
            runner.release()
        self.made.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _on_all_ranks(self, index: int, work: Callable[[], T]) -> T:
        """This rank's result of work on a plan.

        A rank that fails leaves the groups, so that the others fail too instead of waiting.

        Raises:
            _DroppedError: some rank ran out of memory.
        """
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
            _forget_frames(error)
            self.release()
            abort_temporary_groups()
        outcomes = _vote(None if failure is None else isinstance(failure, torch.OutOfMemoryError))
        if full := [rank for rank, is_full in enumerate(outcomes) if is_full]:
            self.release()
            abort_temporary_groups()
            raise _DroppedError(index, f"rank(s) {full} ran out of memory in its trial")
        if failure is not None:
            raise failure
        if lost := [rank for rank, outcome in enumerate(outcomes) if outcome is not None]:
            raise DisagreementError(f"rank(s) {lost} failed in the trial of a plan, others did not")
        return result


def _vote(outcome: bool | None) -> list[bool | None]:
    """The outcome on every rank: None without a failure, else whether memory ran out.

    Ranks that are still inside a step exchange another record first. That raises on every rank,
    and they vote next.
    """
    while True:
        try:
            return gather_objects(outcome, "votes on the trial of a plan")
        except CommunicationError:
            raise
        except AutoparError:
            continue


def _forget_frames(error: BaseException | None) -> None:
    """Drops the local variables of frames that an error passed through."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


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

    def release(self) -> None:
        self.optimizer = None
        for parameter in self.module.parameters():
            parameter.grad = None
        del self.module


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
