"""`plan_or_advise`: a plan, or an error with the missing bytes and changes that would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any

from autopar.core.common.checks import MAX_RANKS
from autopar.core.common.deadline import TimeIsOver, arm
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import AutoparError, Change, OutOfMemoryError
from autopar.formatting import duration, human_bytes, memory_text
from autopar.planner.problem import PlanningProblem

MakePlan = Callable[[PlanningProblem], Plan]
"""Returns the fastest plan that fits."""

Replan = Callable[[int, int], Plan]
"""Plans with a multiple of the ranks, or with a fraction 1/n of the rows."""

STATES = ("parameters", "gradients", "optimizer")
"""Categories of memory that do not depend on the number of rows."""

STATE_BLOCKS, LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 32, 1 << 20, 64 << 20
"""Blocks of states on storage, and limits of the parameters that are stepped at once."""

MAX_REPLANS, MAX_SUGGESTIONS = 9, 3
"""Limits on further plans, and on changes that a message suggests."""


@dataclass(frozen=True)
class Suggestion:
    """A change that may help.

    Attributes:
        what: the change in words.
        how: the argument to write.
        states: whether it reduces parameters, gradients and optimizer states.
        activations: whether it reduces everything else.
    """

    what: str
    how: str
    plan: Callable[[], Plan]
    states: bool = True
    activations: bool = True

    def may_help(self, memory: Mapping[str, int], cap: int) -> bool:
        """Whether the bytes by category that it does not reduce fit under the cap."""
        states = _state_bytes(memory)
        rest = sum(memory.values()) - states
        return (self.states or states <= cap) and (self.activations or rest <= cap)


def plan_or_advise(
    problem: PlanningProblem,
    make_plan: MakePlan,
    replan: Replan | None = None,
    *,
    recapture: bool = True,
    deadline: Callable[[], bool] = lambda: True,
) -> Plan:
    """The plan of a problem; live ranks call this at once and see the same plans and errors.

    Without `replan`, ranks and rows are fixed; without `recapture`, captured graphs are. After the
    deadline no further change is tried. The smallest plan is returned if it fits after all: only
    plans near the best are lowered whole.

    Raises:
        OutOfMemoryError: nothing fits; with the bytes that suffice and changes that would help.
    """
    try:
        return make_plan(problem)
    except OutOfMemoryError as failure:
        arm()  # the failure is an answer
        cap = problem.cap_on(problem.cluster) or failure.cap
        if cap is None:
            raise
        advisor = _OomAdvisor(problem, make_plan, replan, cap, recapture, deadline)
        smallest = advisor.smallest_plan(failure.shortfall)
        if smallest is None or smallest.prediction is None:
            raise
        if smallest.prediction.needed_bytes <= cap:  # lowered whole, it needs less than expected
            return replace(smallest, memory_cap=cap)
        raise advisor.advised(smallest, smallest.prediction) from None


def on_more_ranks(problem: PlanningProblem, factor: int) -> PlanningProblem:
    """The problem on a multiple of the ranks, with the same kind of device.

    Raises:
        ClusterError: the larger cluster needs measurements.
    """
    cluster, ranks = problem.cluster, problem.world_size * factor
    assert cluster is not None
    if not cluster.curves and cluster.topology is None:
        cluster = Cluster.default(ranks, cluster.device)
    elif ranks > cluster.world_size:
        cluster = cluster.of_nodes(-(-ranks // cluster.ranks_per_node))
    return replace(problem, world_size=ranks, cluster=cluster)


@dataclass
class _OomAdvisor:
    """Tries changes to a problem for which nothing fits."""

    problem: PlanningProblem
    make_plan: MakePlan
    replan: Replan | None
    cap: int
    recapture: bool
    deadline: Callable[[], bool]
    replans_left: int = MAX_REPLANS
    changes: list[Change] = field(default_factory=list)

    def advised(self, smallest: Plan, cost: Prediction) -> OutOfMemoryError:
        """The failure with missing bytes by category and changes that would help."""
        short, gaps = cost.needed_bytes - self.cap, cost.needed_bytes - sum(cost.memory.values())
        memory = {**cost.memory, "gaps between them": max(0, gaps)}
        self.try_suggestions(memory)
        how = f"memory={cost.needed_bytes}"
        more = Change("more memory on each rank", how, cost.step_s, cost.needed_bytes)
        changes = (*self.changes, more)
        texts = (
            f"{change.what} [{change.how}], a step of {duration(change.step_s)} in "
            f"{human_bytes(change.needed_bytes)}"
            for change in changes
        )
        return OutOfMemoryError(
            f"nothing fits under {human_bytes(self.cap)} per rank: the smallest plan "
            f"({smallest.name}) needs {human_bytes(short)} more ({short} bytes). Its peak is "
            f"{memory_text(memory)}. What would help, each planned again: "
            f"{'; '.join(texts)}.",
            short,
            memory,
            changes,
            self.cap,
        )

    def smallest_plan(self, short: int) -> Plan | None:
        """The smallest plan: raises the cap by each shortfall, a lower bound, until one fits."""
        cap = self.cap
        while self.replans_left > MAX_SUGGESTIONS and self.deadline():
            cap += short
            found = self.try_plan(partial(self.make_plan, replace(self.problem, memory=cap)))
            if not isinstance(found, OutOfMemoryError):
                return found
            short = found.shortfall
        return None

    def try_suggestions(self, memory: Mapping[str, int]) -> None:
        """Plans with suggestions until enough of them help; each may depend on earlier results."""
        variations = self.other_graphs(memory), self.other_batch_or_ranks(memory)
        for suggestion in chain(self.same_graphs(memory), *variations):
            enough = not self.replans_left or len(self.changes) == MAX_SUGGESTIONS
            if enough or not self.deadline():
                return
            if not suggestion.may_help(memory, self.cap):
                continue
            plan = self.try_plan(suggestion.plan)
            if isinstance(plan, Plan) and (cost := plan.prediction) is not None:
                change = Change(suggestion.what, suggestion.how, cost.step_s, cost.needed_bytes)
                self.changes.append(change)

    def try_plan(self, plan: Callable[[], Plan]) -> Plan | OutOfMemoryError | None:
        """One further plan, or its OutOfMemoryError; None after any other error."""
        self.replans_left -= 1
        try:
            return plan()
        except OutOfMemoryError as failure:
            return failure
        except (AutoparError, TimeIsOver):
            return None

    def states_offloaded(
        self, problem: PlanningProblem, nbytes: int, where: str, *also: str
    ) -> Suggestion:
        """A suggestion of the user's optimizer with its states, of so many bytes, offloaded."""
        block = state_block_bytes(problem)
        name = _kind(problem.optimizer).__name__
        folder = f", folder={where!r}" if where else ""
        given = f"{name}{folder}, block_bytes={block}"
        how = f"optimizer=functools.partial(autopar.OffloadedOptimizer, {given})"
        what = f"states of the optimizer {_place(where)} ({human_bytes(nbytes)})"
        what = f"{what}, and activations or parameters" if also else what
        stored = replace(problem, state_block_bytes=block)
        return Suggestion(what, "; ".join((how, *also)), partial(self.make_plan, stored))

    def same_graphs(self, memory: Mapping[str, int]) -> Iterator[Suggestion]:
        """Suggestions that need no other captures or measurements."""
        strategy = self.problem.strategy
        where = strategy.offload_dir or ("" if self.problem.on_gpus else "FOLDER")
        auto = replace(strategy, offload=strategy.offload or "auto", offload_dir=where or None)
        folder = f", offload_dir={where!r}" if where else ""
        moved = f"Strategy(offload='auto'{folder})"
        if strategy.offload is None:
            within = replace(self.problem, strategy=auto)
            what = f"activations or parameters {_place(where)}"
            yield Suggestion(what, moved, partial(self.make_plan, within))
        recomputes = strategy.recompute in (None, "full")
        if not recomputes:
            yield self.strategy_with("activations computed again", False, recompute=None)
        if strategy.zero not in (None, 3) and self.problem.replicas > 1:
            yield self.strategy_with("ZeRO as far as needed", zero=None)
            if not recomputes and not self.changes:
                yield self.strategy_with("both of these", zero=None, recompute=None)
        if states := memory.get("optimizer", 0):
            yield self.states_offloaded(self.problem, states, where)
            if strategy.offload is None and not self.changes:
                both = replace(self.problem, strategy=auto)
                yield self.states_offloaded(both, states, where, moved)

    def other_graphs(self, memory: Mapping[str, int]) -> Iterator[Suggestion]:
        """Suggestions that divide the same batch or the model differently."""
        strategy = self.problem.strategy
        if not self.recapture:
            return
        searched = strategy.search or strategy.pp_size > 1
        now = strategy.micro_batches or 1
        if not searched or now > 1:  # a search has tried these numbers
            yield from self.first_that_helps(
                self.strategy_with(f"{n * now} micro-batches", False, micro_batches=n * now)
                for n in self.batch_divisors(memory)
                if n * now <= MAX_RANKS
            )
        if not strategy.search and self.problem.batch == "global":
            yield from self.first_that_helps(
                self.strategy_with(f"the model divided over {ranks} ranks", True, **{axis: ranks})
                for axis in ("tp", "pp")
                for ranks in self.model_divisors(memory)
                if getattr(strategy, axis) is None
            )

    def other_batch_or_ranks(self, memory: Mapping[str, int]) -> Iterator[Suggestion]:
        if self.replan is None:
            return
        replan, least = self.replan, _power_of_two(sum(memory.values()) / self.cap)
        yield from self.first_that_helps(
            Suggestion("fewer rows in a batch", f"1/{n} of them", partial(replan, 1, n), False)
            for n in self.batch_divisors(memory)
        )
        world_size = self.problem.world_size
        yield from self.first_that_helps(
            Suggestion("more ranks", f"world_size={n * world_size}", partial(replan, n, 1))
            for n in (least, 2 * least)
        )

    def first_that_helps(self, suggestions: Iterable[Suggestion]) -> Iterator[Suggestion]:
        before = len(self.changes)
        yield from takewhile(lambda _: len(self.changes) == before, suggestions)

    def batch_divisors(self, memory: Mapping[str, int]) -> tuple[int, int]:
        """Divisors of the batch with which activations may fit beside the states."""
        states = _state_bytes(memory)
        least = _power_of_two((sum(memory.values()) - states) / max(1, self.cap - states))
        return least, 2 * least

    def model_divisors(self, memory: Mapping[str, int]) -> list[int]:
        """The least number of model-parallel ranks with which the states may fit, if any."""
        least = _state_bytes(memory) / self.cap
        strategy = self.problem.strategy
        ranks = self.problem.world_size // (strategy.model_parallel_size * strategy.pp_size)
        return [n for n in range(2, ranks + 1) if ranks % n == 0 and n >= least][:1]

    def strategy_with(self, what: str, states: bool = True, **changes: Any) -> Suggestion:
        """A suggestion to change fields of the strategy, which always reduces activations."""
        problem = replace(self.problem, strategy=replace(self.problem.strategy, **changes))
        fields = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        return Suggestion(what, f"Strategy({fields})", partial(self.make_plan, problem), states)


def _place(folder: str) -> str:
    """The lower level of memory in a folder; "" for the host's."""
    return "on storage" if folder else "in host memory"


def state_block_bytes(problem: PlanningProblem) -> int:
    """A size for the blocks of an `OffloadedOptimizer`: a part of the parameters of a rank."""
    sizes = [parameter.bytes for parameter in problem.parameters.values()]
    each = sum(sizes) // (STATE_BLOCKS * problem.shard_ranks)
    return min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, each))


def _kind(optimizer: Any) -> type:
    """The class of an optimizer or of a partial factory."""
    while isinstance(optimizer, partial):
        optimizer = optimizer.func
    return optimizer if callable(optimizer) else type(optimizer)


def _state_bytes(memory: Mapping[str, int]) -> int:
    return sum(memory.get(kind, 0) for kind in STATES)


def _power_of_two(ratio: float) -> int:
    """The least power of two that is at least `ratio` and 2."""
    return 2 ** max(1, math.ceil(math.log2(max(1.0, ratio))))
