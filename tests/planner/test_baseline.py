"""Torch's data parallelism, by name, among the candidates of a search."""

from dataclasses import replace

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.search_outcome import DDP, FSDP, RECOMPUTED
from autopar.core.plan.strategy import Strategy
from autopar.planner.baseline import Baseline
from autopar.planner.problem import SearchContext
from tests.harness.models import MODELS
from tests.planner.problems import problem_of


def candidate(zero: int, step_s: float, nbytes: int = 1, tp: int | None = None) -> Plan:
    base = problem_of(MODELS["gpt"].make(), Strategy(tp=tp)).base()
    stages = tuple((block, zero) for block, _ in base.zero_stages)
    cost = Prediction(step_s, 0.0, step_s, 0.0, 0.0, peak_bytes=nbytes)
    return replace(base, name=f"zero {zero}", zero_stages=stages, prediction=cost)


def test_the_baseline_is_the_fastest_of_ddp_and_fully_shard_that_fits() -> None:
    baseline = Baseline(cap=10)
    context = SearchContext(baseline=baseline)
    others = candidate(1, 0.1), candidate(0, 0.1, nbytes=11), candidate(0, 0.1, tp=2)
    for plan in others:
        context.note(plan)
    assert baseline.best is None
    context.note(fast := candidate(3, 0.5))
    context.note(candidate(0, 0.6))
    assert baseline.best is fast
    assert {name: plan.prediction.step_s for name, plan in baseline.fastest.items()} == {
        DDP: 0.6,
        FSDP: 0.5,
    }


def test_a_baseline_that_does_not_fit_is_known_with_what_it_lacks() -> None:
    baseline = Baseline(cap=10)
    baseline.note(candidate(0, 0.1, nbytes=11))
    chosen = candidate(3, 0.2).prediction
    assert baseline.best is None
    assert baseline.runner_up(chosen, DDP).why == "needs 1 B more than the cap"
    assert baseline.runner_up(chosen, FSDP, RECOMPUTED) is None


def test_every_usual_name_has_a_step_or_a_reason() -> None:
    baseline = Baseline(cap=10)
    assert [each.why for each in baseline.usual(12.0, "7 rows")] == [
        "its parameters and states alone need 2 B more than the cap",
        "7 rows",
        "7 rows",
    ]
    baseline.note(candidate(3, 0.2, nbytes=11))
    again = candidate(3, 0.3)
    baseline.note(replace(again, recompute=(("0", "full"),)))
    ddp, plain, recomputed = baseline.usual(9.0, "7 rows")
    assert (ddp.why, plain.why) == ("7 rows", "needs 1 B more than the cap")
    assert (recomputed.plan, recomputed.step_s) == ("zero 3", 0.3)
    baseline = Baseline(cap=10)
    baseline.note(candidate(3, 0.2))
    assert [*baseline.usual(9.0, "7 rows")][2].why == "not needed, since FSDP fits without"
