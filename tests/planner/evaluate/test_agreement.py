"""Exchanges of records between ranks take part of a predicted step."""

from dataclasses import replace

import pytest

from autopar.core.common.row_exchange import RECORD_NUMBERS
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.planner.evaluate.candidate import Candidate
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.runtime.agreement.record import encode
from tests.harness.models import MODELS
from tests.planner.problems import evaluator_of, problem_of

RECORD_S = 0.25


def evaluated(strategy: Strategy, record_s: float) -> tuple[Evaluator, Candidate]:
    case, cluster = MODELS["gpt"], Cluster.default(4)
    cluster = replace(cluster, slowdown=replace(cluster.slowdown, record_s=record_s))
    model = case.make()
    return evaluator_of(model, case.batch(8, 0)[0], problem_of(model, strategy, cluster=cluster))


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(pp=2, micro_batches=2, schedule="1f1b")],
    ids=["spmd", "pipeline"],
)
def test_a_step_has_two_exchanges(strategy: Strategy) -> None:
    evaluator, found = evaluated(strategy, RECORD_S)
    _, without = evaluated(strategy, 0.0)
    more_s = found.step_s - without.step_s
    assert more_s == pytest.approx(2 * RECORD_S)
    assert found.prediction.exposed_s - without.prediction.exposed_s == pytest.approx(more_s)
    assert found.prediction.compute_s == pytest.approx(without.prediction.compute_s)
    cluster = evaluator.setup.cluster
    assert evaluator.seconds(found.config, [cluster]) == [pytest.approx(found.step_s)]


def test_measured_records_have_the_size_of_a_record() -> None:
    assert len(encode("calls a model", [], 0, [])) == RECORD_NUMBERS
