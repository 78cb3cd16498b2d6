"""`SearchRecord`: meshes that a search planned or left out, their bounds, and what it tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar.core.common.deadline import TimeIsOver
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import RUNNERS_UP, RunnerUp, slower
from autopar.core.plan.search_outcome import PracticePlan, SearchOutcome
from autopar.core.plan.strategy import Strategy
from autopar.errors import AutoparError, BatchError, OutOfMemoryError, PlanError
from autopar.formatting import duration, human_bytes
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.mesh_estimate import MeshEstimate
from autopar.planner.search.meshes import abbreviated, least_compute_s, mesh_name
from autopar.planner.search.pipeline_search import step_s

NEGLIGIBLE = 0.02
"""Fraction of a step: other meshes are not tried if they could save at most this."""

MANY_ROWS = "they need other numbers of rows"


@dataclass(kw_only=True)
class SearchRecord:
    """Plans and refusals of the meshes tried so far.

    Attributes:
        refusals: errors of meshes that are not possible, by name.
        skipped: estimates of meshes that were not tried.
        bounds_s: lower bound of the step of meshes in seconds, by name; infinite if nothing fits.
        floor_s: lower bound of the step of meshes without an estimate, in seconds.
        unknown: meshes that were not estimated, because time ran out.
        costly: meshes whose lowering would have taken longer than the time that was left.
        looked: number of meshes that were planned.
        tried: names of these meshes.
        practice: plans of usual layouts, by the name of the layout.
    """

    problem: PlanningProblem
    plans: list[Plan] = field(default_factory=list)
    failures: list[OutOfMemoryError] = field(default_factory=list)
    refusals: dict[str, AutoparError] = field(default_factory=dict)
    skipped: list[MeshEstimate] = field(default_factory=list)
    bounds_s: dict[str, float] = field(default_factory=dict)
    floor_s: float = 0.0
    unknown: list[Strategy] = field(default_factory=list)
    costly: list[Strategy] = field(default_factory=list)
    looked: int = 0
    tried: set[str] = field(default_factory=set)
    over: bool = False
    practice: dict[str, PracticePlan] = field(default_factory=dict)

    @property
    def best(self) -> Plan | None:
        return min(self.plans, key=step_s) if self.plans else None

    def computes_only(self) -> bool:
        """Whether nearly all of the best step is compute, which every mesh only divides."""
        best = self.best
        if best is None or best.model_parallel_size > 1 or recomputes(best):
            return False  # or something may be computed twice
        return saveable(best) <= NEGLIGIBLE

    def is_memory_bound(self) -> bool:
        """Whether smaller micro-batches could help; they only save memory."""
        if self.best is None:
            return bool(self.failures)
        return self.best.memory_cap is not None and recomputes(self.best)

    def raise_bound(self, strategy: Strategy, bound_s: float) -> None:
        """Records a lower bound of the step of a mesh in seconds, unless a higher one is known."""
        name = mesh_name(strategy)
        self.bounds_s[name] = max(bound_s, self.bounds_s.get(name, 0.0))

    def least_s(self) -> float:
        """Lower bound of the step of every mesh, in seconds.

        A mesh whose search ended early may have no bound of its own. The floor and the FLOPs at
        the peak rate hold for every mesh.
        """
        assert self.best is not None
        best_s = step_s(self.best)
        floor_s = min(best_s, max(least_compute_s(self.best), self.floor_s))
        return floor_s if self.unknown else max(floor_s, min([*self.bounds_s.values(), best_s]))

    def skipped_note(self) -> Iterator[str]:
        if self.skipped:
            expected_s = min(each.step_s for each in self.skipped)
            bound_s = min(each.least_s for each in self.skipped)
            names = abbreviated(mesh_name(each.strategy) for each in self.skipped)
            yield (
                f"not looked at: {names}; expected to take {duration(expected_s)} or more, and "
                f"certainly {duration(bound_s)}"
            )
        if self.unknown:
            names = abbreviated(map(mesh_name, self.unknown))
            yield f"not looked at: {names}; time ran out"
        if self.costly:
            names = abbreviated(map(mesh_name, self.costly))
            yield f"not looked at: {names}; to lower them takes longer than was left"

    def saveable_note(self, others: Sequence[Strategy]) -> str:
        assert self.best is not None
        savings = f"{saveable(self.best):.0%} of the step is all that they could save"
        return f"not looked at: {abbreviated(map(mesh_name, others))}; {savings}"

    def leave_out(self, strategy: Strategy) -> None:
        """Records a mesh without an estimate, unless it was planned."""
        if mesh_name(strategy) not in self.tried:
            self.unknown.append(strategy)

    def finish_computing(self, others: Sequence[Strategy]) -> Plan:
        """The best plan, which computes only, so that `others` are not worth a look."""
        assert self.best is not None
        least_s = (1.0 - saveable(self.best)) * step_s(self.best)
        return self.finish(self.saveable_note(others), bound_s=least_s)

    def outcome(self, bound_s: float | None) -> SearchOutcome:
        """Extent of the search; the bound is that of all estimated meshes unless given."""
        assert self.best is not None
        left_out = len(self.skipped) + len(self.unknown) + len(self.costly)
        return SearchOutcome(
            looked=self.looked,
            left_out=left_out,
            bound_s=self.least_s() if bound_s is None else bound_s,
            complete=not (self.unknown or self.over or self.costly),
            practice=tuple(self.practice.values()),
        )

    def finish(self, *notes: str, bound_s: float | None = None) -> Plan:
        """The best plan with runners-up and notes; raises the least shortfall, else a refusal."""
        if self.best is None:
            if self.failures:
                raise self.nothing_fits()
            if self.refusals:
                raise next(iter(self.refusals.values()))
            raise TimeIsOver
        best = self.best
        notes = (*best.notes, *self.refusal_notes(), *notes)
        found = self.outcome(bound_s)
        return replace(best, runners_up=self.runners_up(best), notes=notes, search=found)

    def nothing_fits(self) -> AutoparError:
        """The least shortfall, or that time ended before any mesh was found to fit."""
        nearest = min(self.failures, key=lambda failure: failure.shortfall)
        left = [*(each.strategy for each in self.skipped), *self.unknown, *self.costly]
        if not left:
            return nearest
        return PlanError(
            f"no plan of {self.problem.model} that fits was found in time, though there may be "
            f"one. {self.looked} meshes were tried, and the nearest that is known not to fit lacks "
            f"at least {human_bytes(nearest.shortfall)}. Not looked at: "
            f"{abbreviated(map(mesh_name, left))}. Give a longer time_limit_s, or fix one of these "
            "meshes in the strategy."
        )

    def refusal_notes(self) -> Iterator[str]:
        """Notes on meshes that are not possible; those with one reason share a note."""
        meshes: dict[str, list[str]] = {}
        for mesh, error in self.refusals.items():
            why = MANY_ROWS if isinstance(error, BatchError) else str(error)
            meshes.setdefault(why, []).append(mesh)
        for why, names in meshes.items():
            reason = str(self.refusals[names[0]]) if len(names) == 1 else why
            yield f"not possible: {abbreviated(names)}: {reason}"

    def runners_up(self, best: Plan) -> tuple[RunnerUp, ...]:
        """The best plans of the other meshes, and the runners-up on the best mesh."""
        assert best.prediction is not None
        found = {}
        for plan in self.plans:
            if plan is not best and plan.prediction is not None:
                why = slower(plan.prediction, best.prediction)
                found[plan.name] = RunnerUp.of(plan.name, plan.prediction, why)
        for other in best.runners_up:
            found.setdefault(other.name, other)
        return tuple(sorted(found.values(), key=lambda other: other.step_s)[:RUNNERS_UP])


def recomputes(plan: Plan) -> bool:
    """Whether a plan recomputes activations of any block."""
    return any(level != "none" for _, level in plan.recompute)


def saveable(plan: Plan) -> float:
    """Fraction of a step that a rank stalls, the most that another mesh can save."""
    cost = plan.prediction
    assert cost is not None
    return cost.exposed_s / cost.step_s + cost.bubble if cost.step_s else 0.0
