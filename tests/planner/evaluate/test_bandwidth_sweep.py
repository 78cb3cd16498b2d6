"""Prices over other links, and what a plan says would change it."""

from dataclasses import replace

import pytest
import torch

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction, RunnerUp, slower
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.group_shape import GroupShape
from autopar.planner.evaluate.bandwidth_sweep import RATES, ScaledBandwidth, sweep_bandwidth
from autopar.planner.evaluate.candidate import Candidate
from autopar.planner.evaluate.evaluator import Evaluator
from tests.planner.blocks import GPTBlock, Stack
from tests.planner.problems import evaluator_of, problem_of

H100 = Cluster.named("dgx-h100")


def test_faster_links_carry_bytes_faster_and_start_as_late() -> None:
    shape = GroupShape(8, 8, 1)
    empty, much = (H100.seconds("all_reduce", n, shape).seconds for n in (1, 2**30))
    twice = ScaledBandwidth.of(H100, 2.0)
    assert twice.seconds("all_reduce", 1, shape).seconds == empty
    found = twice.seconds("all_reduce", 2**30, shape).seconds
    assert found == pytest.approx(empty + (much - empty) / 2)


def evaluator(strategy: Strategy) -> tuple[Evaluator, Candidate]:
    """Of two blocks on eight GPUs that are not here."""
    with torch.device("meta"):
        model, inputs = Stack(lambda: GPTBlock(256, 4), 2), torch.empty(16, 64, 256)
    problem = problem_of(model, strategy, world_size=8, cluster=H100)
    problem = replace(problem, comm_backend="nccl", device=torch.device("meta"))
    return evaluator_of(model, (inputs,), problem)


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(pp=2, micro_batches=2, schedule="1f1b")],
    ids=["whole", "staged"],
)
def test_a_step_over_the_links_that_there_are_is_the_prediction(strategy: Strategy) -> None:
    priced, own = evaluator(strategy)
    step_s = own.prediction.step_s
    assert priced.seconds(own.config, [priced.setup.cluster]) == [pytest.approx(step_s)]
    rates = dict(sweep_bandwidth(priced, own.config))
    assert tuple(rates) == RATES
    assert rates[0.25] > rates[0.5] > step_s > rates[2.0] > rates[4.0]


def of(step_s: float, needed: int, rates: tuple[float, ...] = ()) -> Prediction:
    at = tuple(zip(RATES, rates, strict=False))
    return Prediction(step_s, 0.0, step_s, 0.0, 0.0, needed, at_rates=at)


def test_what_would_change_the_choice() -> None:
    """A step takes 1 s and another a byte's time; the rival's 1.85 s and a quarter of that."""
    best = of(2.0, 1000, (5.0, 3.0, 1.5, 1.25))
    rival = of(2.1, 900, (2.85, 2.35, 1.975, 1.9125))
    larger, largest = of(1.8, 1500), of(1.9, 1600)
    others = {"rival": rival, "larger": larger, "largest": largest}
    plan = replace(
        problem_of(torch.nn.Linear(2, 2), Strategy(), memory=1200).base(),
        prediction=best,
        runners_up=tuple(
            RunnerUp.of(name, cost, slower(cost, best)) for name, cost in others.items()
        ),
    )
    text = plan.explain()
    for line in (
        "The step is bound by computation: 2.00 s, 100% of it.",
        "with 1.5 KiB a rank or more: larger, 200 ms faster",
        "the choice fits down to 1000 B a rank; below that: rival, 100 ms slower",
        "with links at 0.88 of their rate or less: rival",
        "rival: 2.10 s, 900 B: 100 ms slower: +100 ms to compute",
    ):
        assert line in text, text
    assert "largest," not in text
    assert Plan.from_dict(plan.to_dict()) == plan
    near = replace(plan, runners_up=(RunnerUp.of("behind", of(3.0, 900, (6, 4, 2.5, 2)), ""),))
    assert "from 0.25 to 4 of the links' rate it stays ahead of behind" in near.explain()
