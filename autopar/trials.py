"""Trials: plans that are predicted to be nearly as fast as the best, run where they would train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.cost_model.optimizer import Optimizer
from autopar.plan import Plan
from autopar.planner.decide import Question
from autopar.planner.machine import ranks_of
from autopar.planner.rivals import TRIALS, after_trial, worth_trying
from autopar.runtime.agreement import decided_by_first, is_live
from autopar.runtime.module import DistributedModule
from autopar.runtime.trial import race, room


def wanted(trials: int | None, question: Question) -> int:
    """How many plans are tried, if somebody says so or the mesh is searched; 0 for none."""
    if not is_live():
        return 0
    several = question.world_size > 1 and bool(question.strategy.search)
    return TRIALS * several if trials is None else trials


def contestants(question: Question, plan: Plan, trials: int) -> list[Plan]:
    """The plan chosen by prediction, and behind it those that are worth a trial beside it."""
    rivals = question.rivals
    if rivals is None or plan.prediction is None:
        return [plan]
    free = room(question.device, ranks_of(live=True).sharing)
    return decided_by_first(lambda: worth_trying(plan, rivals, trials, free))


def fastest_of(
    module: DistributedModule, plans: Sequence[Plan], call: Any, optimizer: Optimizer
) -> Plan:
    """The plan that is fastest where it runs.

    Args:
        module: that has no plan yet.
        plans: to try; one alone is taken.
        call: its arguments and keyword arguments.
        optimizer: class or factory.
    """
    if len(plans) == 1:
        return plans[0]
    args, kwargs = call
    timed = race(module.copied_under, plans, args, kwargs, optimizer)
    return after_trial(plans, timed.seconds, timed.rounds)
