"""Over which axes ranks lie: every mesh that a strategy leaves open, and the fastest of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from autopar.errors import (
    AutoparError,
    BatchError,
    CaptureError,
    OutOfMemoryError,
    StrategyError,
)
from autopar.plan import Plan
from autopar.plan_text import human_bytes
from autopar.planner.choose_stages import step_s
from autopar.planner.decide import Question, cap_of
from autopar.prediction import RUNNERS_UP, RunnerUp
from autopar.strategy import Strategy

Look = Callable[[Question], Plan]
"""The fastest plan of a strategy that leaves no mesh open; captures and measures what it needs."""

SMALL_WORLD = 8
"""Ranks up to which the model is divided over nodes too: more would send activations far."""

MICRO_BATCHES = (1, 2, 4, 8)
"""What is tried without stages, where memory presses."""

NEGLIGIBLE = 0.02
"""Part of a step below which nothing that another mesh could save is looked for."""


def meshes(strategy: Strategy, world_size: int, near: int, blocks: int) -> Iterator[Strategy]:
    """Every way to lay ranks along the axes that a strategy leaves open, the fewest parts first.

    Args:
        strategy: what is fixed; `search` names the open axes.
        world_size: number of ranks.
        near: how many of them are on one node.
        blocks: how many parts with parameters the model has, which is the most stages it can have.
    """
    widest = world_size if world_size <= SMALL_WORLD else near
    most = {"pp": blocks, **dict.fromkeys(("tp", "cp", "ep"), widest)}
    found = [replace(strategy, search=())]
    for axis in strategy.search:
        if getattr(strategy, axis) is None:
            sizes = [n for n in range(1, most[axis] + 1) if world_size % n == 0]
            found = [replace(one, **{axis: n}) for one in found for n in sizes]  # type: ignore[arg-type]
    fitting = [one for one in found if world_size % _parts(one) == 0]
    yield from sorted(fitting, key=lambda one: (_parts(one), one.pipeline_ranks))


def _parts(strategy: Strategy) -> int:
    return strategy.tensor_ranks * strategy.pipeline_ranks


def fastest_mesh(
    question: Question, look: Look, near: int, go_on: Callable[[], bool] = lambda: True
) -> Plan:
    """The fastest plan that fits, of all meshes that a strategy leaves open.

    A mesh is left out where its states alone exceed the cap. The search ends where the fastest
    plan so far computes all but a negligible part of its step: every mesh divides the same work.
    Live ranks call this at once; they all see the same plans and errors.

    Args:
        question: what is asked.
        look: answers a question without an open mesh.
        near: ranks of a node.
        go_on: asked before every further mesh.

    Raises:
        OutOfMemoryError: nothing fits; that of the mesh that lacks least.
    """
    if not question.strategy.search:
        return look(question)
    search = _Search(question, look)
    blocks = len(question.blocks)
    for strategy in meshes(question.strategy, question.world_size, near, blocks):
        if search.best is not None and (search.is_bound_by_computing() or not go_on()):
            search.left_out.append(_name(strategy))
        else:
            search.look_at(strategy)
    return search.end()


class _Search:
    def __init__(self, question: Question, look: Look) -> None:
        self.question, self.look = question, look
        self.cap = cap_of(question, question.cluster)
        self.plans: list[Plan] = []
        self.failures: list[OutOfMemoryError] = []
        self.refusals: dict[str, AutoparError] = {}
        self.left_out: list[str] = []

    @property
    def best(self) -> Plan | None:
        return min(self.plans, key=step_s) if self.plans else None

    def is_bound_by_computing(self) -> bool:
        """Whether no mesh can be much faster than the best so far."""
        assert self.best is not None
        whole = all(level == "none" for _, level in self.best.recompute)
        return whole and _to_gain(self.best) <= NEGLIGIBLE

    def look_at(self, strategy: Strategy) -> None:
        """Looks at a mesh; without stages, at more micro-batches as long as memory presses."""
        if short := self.states_exceed(strategy):
            text = f"parameters, gradients and states alone need {human_bytes(short)} more"
            self.failures.append(OutOfMemoryError(f"{_name(strategy)}: {text}", short))
            return
        open_ = strategy.pipeline_ranks == 1 and strategy.micro_batches is None
        for count in MICRO_BATCHES if open_ else (strategy.micro_batches,):
            own = strategy if count == 1 and open_ else replace(strategy, micro_batches=count)
            if not self.presses(replace(self.question, strategy=own)):
                return

    def presses(self, question: Question) -> bool:
        """Looks at a question; whether less in memory at once could do better."""
        if self.best is not None:
            question = replace(question, beat_s=step_s(self.best))
        try:
            plan = self.look(question)
        except OutOfMemoryError as failure:
            self.failures.append(failure)
            return True
        except (StrategyError, BatchError, CaptureError) as refusal:
            if isinstance(refusal, CaptureError) and _parts(question.strategy) == 1:
                raise  # torch's own data parallelism may serve
            self.refusals[_name(question.strategy)] = refusal
            return False
        self.plans.append(plan)
        recomputes = any(level != "none" for _, level in plan.recompute)
        return plan.memory_cap is not None and recomputes

    def states_exceed(self, strategy: Strategy) -> int:
        """By how many bytes a rank's part of parameters, gradients and states exceeds the cap."""
        if self.cap is None:
            return 0
        base = self.question.base()
        total = sum(size for _, size in base.parameter_bytes)
        parts = self.question.world_size if strategy.zero in (None, 3) else _parts(strategy)
        return max(0, int(total * (2.0 + base.optimizer_state_ratio) / parts) - self.cap)

    def end(self) -> Plan:
        """The best plan, with the others; or why there is none."""
        if self.best is None:
            if self.failures:
                raise min(self.failures, key=lambda failure: failure.shortfall)
            raise next(iter(self.refusals.values()))
        best = self.best
        notes = [f"{mesh} is not possible: {why}" for mesh, why in self.refusals.items()]
        if self.left_out:
            gain = f"{_to_gain(best):.0%} of the step is all that they could save"
            notes.append(f"not looked at: {', '.join(self.left_out)}; {gain}")
        return replace(best, runners_up=self.runners_up(best), notes=(*best.notes, *notes))

    def runners_up(self, best: Plan) -> tuple[RunnerUp, ...]:
        """The fastest of every other mesh, and what lost under the same one."""
        found = {}
        for plan in self.plans:
            if plan is not best and plan.prediction is not None:
                slower = step_s(plan) - step_s(best)
                cost, why = plan.prediction, f"{slower * 1e3:.2f} ms slower"
                found[plan.name] = RunnerUp(plan.name, cost.step_s, cost.peak_bytes, why)
        for other in best.runners_up:
            found.setdefault(other.name, other)
        return tuple(sorted(found.values(), key=lambda other: other.step_s)[:RUNNERS_UP])


def _to_gain(plan: Plan) -> float:
    """The part of a step that a plan waits for other ranks: no mesh computes less."""
    cost = plan.prediction
    assert cost is not None
    return cost.exposed_s / cost.step_s + cost.bubble if cost.step_s else 0.0


def _name(strategy: Strategy) -> str:
    axes = {"pp": strategy.pipeline_ranks, **strategy.axes}
    return " x ".join(f"{axis}={n}" for axis, n in axes.items() if n > 1) or "data parallel"
