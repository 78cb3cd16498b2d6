"""Which plans are worth a trial, and what a trial leaves of them."""

from dataclasses import replace

from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.strategy import Strategy
from autopar.session.race import Trial
from autopar.session.select import select_plans, with_measured_times
from tests.harness.models import MODELS
from tests.planner.problems import problem_of

MODEL = MODELS["gpt"].make()


def plan(name: str, step_s: float, nbytes: int = 10, zero: int = 0, **axes: int) -> Plan:
    cost = Prediction(step_s, 0.0, step_s, 0.0, 0.0, nbytes)
    base = problem_of(MODEL, Strategy(**axes)).base()  # type: ignore[arg-type]
    stages = tuple((block, zero) for block, _ in base.zero_stages)
    return replace(base, name=name, zero_stages=stages, prediction=cost, memory_cap=50)


def names(plans: list[Plan]) -> list[str]:
    return [own.name for own in plans]


BEST = plan("best", 1.0)


def test_the_fastest_of_each_kind_that_could_be_as_fast() -> None:
    others = [
        plan("other buckets", 1.01),
        plan("tall", 1.1, nbytes=51, zero=3),
        plan("sharded", 1.4, zero=1),
        plan("divided", 1.1, tp=2),
        plan("far", 1.7, zero=2),
    ]
    assert names(select_plans(BEST, others, 6, None)) == ["best", "divided", "sharded"]
    assert names(select_plans(BEST, others, 2, None)) == ["best", "divided"]


def test_those_least_like_the_best_come_first() -> None:
    forms = {
        "other schedule": (1.15, Pipeline(2, "1f1b", 4)),
        "stages": (1.1, Pipeline(2, "gpipe", 4)),
        "fewer parts": (1.2, Pipeline(2, "gpipe", 2)),
    }
    staged = [replace(plan(n, s, pp=2), pipeline=form) for n, (s, form) in forms.items()]
    found = select_plans(BEST, [plan("zero1", 1.05, zero=1), *staged], 6, None)
    assert names(found) == ["best", "stages", "fewer parts", "zero1", "other schedule"]


def test_as_many_as_there_is_room_for() -> None:
    others = [plan("divided", 1.1, tp=2), plan("more so", 1.2, tp=4)]
    assert names(select_plans(BEST, others, 6, budget=25)) == ["best", "divided"]
    assert names(select_plans(BEST, others, 6, budget=5)) == ["best"]


def test_the_fastest_is_taken_and_the_rest_are_kept() -> None:
    other = plan("divided", 1.1, tp=2)
    found = with_measured_times(Trial((BEST, other), (1.25, 1.0), rounds=7))
    assert found.name == "divided"
    assert found.runners_up[0].name == "best"
    assert found.runners_up[0].why == "250 ms slower in a trial"
    assert found.notes[-1] == (
        "the fastest of 2 plans that ran for up to 7 steps each: "
        "divided: 1.00 s (predicted 1.10 s); best: 1.25 s (predicted 1.00 s)"
    )
    assert found.prediction == other.prediction


def test_a_tie_goes_to_the_plan_that_splits_less() -> None:
    other = plan("divided", 0.9, tp=2)
    found = with_measured_times(Trial((other, BEST), (1.0, 1.02), rounds=9))
    assert found.name == "best"
    assert "as fast in a trial" in found.runners_up[0].why
    assert found.notes[-1].startswith("as fast as the fastest of 2 plans")
    apart = with_measured_times(Trial((other, BEST), (1.0, 1.05), rounds=9))
    assert apart.name == "divided"
