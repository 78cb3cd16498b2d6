"""`Baseline`: torch's data parallelism among the candidates of a search, by its usual names."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction, RunnerUp, slower
from autopar.core.plan.search_outcome import DDP, FSDP, RECOMPUTED, PracticePlan
from autopar.formatting import human_bytes


class Baseline:
    """The best of torch's DDP and fully_shard among the candidates of a search.

    Attributes:
        cap: bytes of a rank; None if unknown.
        fastest: the fastest plan of each by its usual name; one that fits, if any does.
    """

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self.fastest: dict[str, Plan] = {}

    @property
    def best(self) -> Plan | None:
        """The fastest candidate that fits, None if there is none yet."""
        fitting = (plan for plan in self.fastest.values() if self.fits(plan))
        return min(fitting, key=self._order, default=None)

    def note(self, plan: Plan) -> None:
        """Records a candidate if it is DDP's or fully_shard's."""
        if plan.prediction is None or not (name := usual_name(plan)):
            return
        fastest = self.fastest.get(name)
        if fastest is None or self._order(plan) < self._order(fastest):
            self.fastest[name] = plan

    def fits(self, plan: Plan | None) -> bool:
        """Whether there is a plan, and it fits under the cap."""
        return plan is not None and not self._order(plan)[0]

    def runner_up(self, best: Prediction, *names: str) -> RunnerUp | None:
        """The fastest plan of some names, beside the best of all; None if none is known."""
        plans = [self.fastest[name] for name in names if name in self.fastest]
        plan = min(plans, key=self._order, default=None)
        if plan is None or (cost := plan.prediction) is None:
            return None
        return RunnerUp.of(plan.name, cost, self._lack(plan) or slower(cost, best))

    def usual(self, state_bytes: float, otherwise: str) -> Iterator[PracticePlan]:
        """Each usual name with its fastest plan, or the reason why there is none.

        Args:
            state_bytes: bytes that parameters, gradients and optimizer states take under DDP.
            otherwise: reason where nothing is known of a name.
        """
        for name in (DDP, FSDP, RECOMPUTED):
            plan = self.fastest.get(name)
            if plan is not None and (cost := plan.prediction) is not None:
                lack, step_s = self._lack(plan), cost.step_s
                price = PracticePlan(name, plan.name, step_s, needed_bytes=cost.needed_bytes)
                yield PracticePlan(name, why=lack) if lack else price
            elif name == DDP and (lack := self._more(round(state_bytes))):
                yield PracticePlan(name, why=f"its parameters and states alone need {lack}")
            elif name == RECOMPUTED and self.fits(self.fastest.get(FSDP)):
                yield PracticePlan(name, why="not needed, since FSDP fits without")
            else:
                yield PracticePlan(name, why=otherwise)

    def _lack(self, plan: Plan) -> str:
        """Text of what a plan needs beyond the cap; "" if it fits."""
        assert plan.prediction is not None
        more = self._more(plan.prediction.needed_bytes)
        return more and f"needs {more}"

    def _more(self, needed_bytes: int) -> str:
        if self.cap is None or needed_bytes <= self.cap:
            return ""
        return f"{human_bytes(needed_bytes - self.cap)} more than the cap"

    def _order(self, plan: Plan) -> tuple[bool, float]:
        cost = plan.prediction
        assert cost is not None
        return self.cap is not None and cost.needed_bytes > self.cap, cost.step_s


def usual_name(plan: Plan) -> str:
    """The usual name of plain data parallelism; "" for other plans.

    It has one ZeRO stage, 0 or 3, and one level of recomputation.
    """
    stages = {stage for _, stage in plan.zero_stages}
    levels = {level for _, level in plan.recompute}
    lossy = any((*plan.compressions.reduce, *plan.compressions.gather))
    uniform = stages in ({0}, {3}) and len(levels) <= 1 and not plan.hybrid
    other = lossy or plan.overlaps or plan.offload or plan.offload_parameters
    plain = plan.loss_chunks == 1 and not other
    if not (uniform and plan.dp_size == plan.world_size and plain):
        return ""
    if stages == {0}:
        return DDP
    return FSDP if levels <= {"none"} else RECOMPUTED
